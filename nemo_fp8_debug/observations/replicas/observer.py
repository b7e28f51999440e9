"""Observe whether the copies of a tensor on several ranks are equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ...capture.device_to_host import Move
from ...capture.gemms import is_observed_in_forward
from ...capture.operands import OperandAccumulator
from ...core.keys import Key
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, FeatureObservation, Lanes
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver
from .checksums import ReplicaChecksums
from .comparison import Checksums, ReplicaReduction, ReplicaResult, make_replica_columns
from .table import TABLES

_Compared = Mapping[tuple[str, str], ReplicaResult]


def make_observation(setup: RunSetup) -> ReplicaObservation | None:
    """Return the observation of copies, or None if it is not enabled."""
    if not setup.config.replicas:
        return None
    return ReplicaObservation(ReplicaReduction(setup.gemm_names, setup.parts, setup.ranks.rank))


class ReplicaStep(StepObserver):
    """The observer of copies in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        gemms = {sink.gemm.name: sink.gemm for sink in step.sinks.values() if not is_observed_in_forward(sink.gemm)}
        self.checks = ReplicaChecksums(list(gemms.values()), step.watched.model.masters, step.guard, step.watched.world == 1)
        step.copies = self.checks

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        self.checks.subscribe(step.dispatcher)

    def move_tensors(self, to: Move) -> None:
        """See `StepObserver`."""
        self.checks.move_tensors(to)


class ReplicaObservation(FeatureObservation):
    """Checksums of copies, compared over ranks."""

    name = "replicas"

    def __init__(self, comparison: ReplicaReduction) -> None:
        self._copies = comparison

    def start_observer(self, step: OpenStep) -> ReplicaStep:
        """See `FeatureObservation`."""
        return ReplicaStep(step)

    def collect_results(self, mine: ReplicaStep | None, operands: Sequence[OperandAccumulator]) -> Checksums:
        """See `FeatureObservation`."""
        return mine.checks.collect_checksums() if mine else {}

    def pack_results(self, plan: AgreedSampleSettings, found: Checksums | None, expected: Collection[Key]) -> Arrays:
        """See `FeatureObservation`."""
        return {"slots": self._copies.list_slot_checksums(found or {})}

    def collect_maxima(self, packed: Arrays) -> torch.Tensor:
        """See `FeatureObservation`."""
        return self._copies.collect_maxima(packed["slots"])

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `FeatureObservation`."""
        return {5: self._copies.collect_sums(packed["slots"], extremes).flatten()}

    def combine_all_ranks(self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor) -> _Compared:
        """See `FeatureObservation`."""
        return self._copies.unpack_all_ranks(sums[5], extremes)

    def compute_single_rank_result(self, found: Checksums) -> _Compared:
        """Return the comparisons within this rank: weights with their masters."""
        slots = self._copies.list_slot_checksums(found)
        extremes = self._copies.collect_maxima(slots)
        copies = self._copies.unpack_all_ranks(self._copies.collect_sums(slots, extremes).flatten(), extremes)
        return {key: compared for key, compared in copies.items() if compared.ranks}

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        return {TABLES[0].name: make_replica_columns(sampled.whole[self.name], sampled.kinds)}

"""Observe whether the copies of a tensor on several ranks are equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ...capture.backends.base import StoredCodes, read_raw_weight
from ...capture.backends.parallel import find_replica_part_index
from ...capture.backends.transformer_engine.casts import is_quantized_tensor
from ...capture.device_to_host import Move
from ...capture.dispatcher import EventDispatcher
from ...capture.gemms import Gemm, is_observed_in_forward
from ...capture.operands import OperandAccumulator
from ...capture.optimizer_weights import MasterWeights, is_optimizer_state_sharded, list_optimizer_weights
from ...capture.tensors import is_dtensor, take_local_part
from ...core.keys import Key
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, FeatureObservation, Lanes
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver
from ...numerics.formats import is_nearest_code
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


# Checksums -------------------------------------------------------------------------------------------------------------


_COMPARING = "while comparing copies over ranks"
#: number of values to process at once; limits temporaries to some tens of MiB
_CHUNK = 1 << 20
_MULTIPLIER, _OFFSET = -7046029254386353131, 1442695040888963407  # 2^64 / golden ratio, odd; Knuth's increment
#: integer types to read bits as, of at most 32 bits so that the highest bit counts too
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def compute_checksum(x: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bits and positions, an int64 scalar on its device, without host synchronization.

    A change of a single value always changes the checksum: each value is multiplied by its own odd number, modulo 2^64.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> [bool(compute_checksum(x) == compute_checksum(other)) for other in (x.clone(), x.flip(0))]
        [True, False]
    """
    bits = x.detach().contiguous().view(_BITS[x.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].long()
        place = torch.arange(begin, begin + len(part), device=bits.device)
        total += (part * ((place * _MULTIPLIER + _OFFSET) | 1)).sum()
    return total + len(bits)


class ReplicaChecksums:
    """Checksums of one sampled step on this rank."""

    def __init__(
        self,
        gemms: Sequence[Gemm],
        masters: MasterWeights,
        guard: Callable[[str], AbstractContextManager[None]],
        is_alone: bool = False,
    ) -> None:
        """
        Args:
            gemms: GEMMs whose tensors to compare.
            masters: finds master weights.
            guard: returns a context that keeps an exception out of the training loop.
            is_alone: whether no other rank has copies. Then we only compare weights with their masters.
        """
        self._gemms, self._masters, self._guard = {gemm.name: gemm for gemm in gemms}, masters, guard
        self._alone = is_alone
        self._found: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}

    def subscribe(self, dispatcher: EventDispatcher) -> None:
        """Observe gradients when an optimizer steps."""
        guard = partial(self._guard, _COMPARING)
        dispatcher.watch_optimizer(guard, self._before_step)
        dispatcher.watch_optimizer(guard, self._masters.add_optimizer)

    def add_tensor(self, name: str, role: str, x: torch.Tensor) -> None:
        """Compute the checksum of a tensor. Only the first call for each tensor in a step counts."""
        if (name, role) in self._found or name not in self._gemms:
            return
        with self._guard(_COMPARING):
            part = None if is_dtensor(x) or self._alone else find_replica_part_index(self._gemms[name].module, role)
            if part is not None and x.numel():
                self._found[name, role] = part, compute_checksum(x)
            if role == "weight":
                self._see_master(self._gemms[name])

    def add_stored_weight(self, name: str, stored: StoredCodes) -> None:
        """Compute the checksum of a weight stored as codes, and compare its values with its master weight."""
        if (name, "weight") in self._found or (name, "master") in self._found or name not in self._gemms:
            return
        with self._guard(_COMPARING):
            codes, parameter = stored.decode_values(), stored.parameter
            self.add_tensor(name, "weight", codes.values)
            master = self._masters.find_master(parameter)
            if master is not None and master[0].numel():
                values, start = master
                mine = codes if values.numel() == codes.values.numel() else codes.slice_values(start, values.numel())
                self._found[name, "master"] = 0, (~is_nearest_code(mine, values, parameter.dtype)).long()

    def _see_master(self, gemm: Gemm) -> None:
        """Compare a parameter with this rank's part of its master weight.

        Store 0 if the parameter equals the rounded master weight, otherwise 1.
        """
        parameter: Any = read_raw_weight(gemm.module) if not gemm.part else None
        if parameter is None or is_dtensor(parameter) or is_quantized_tensor(parameter):
            return
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return
        master = self._masters.find_master(parameter)
        if master is not None and master[0].numel():
            values, start = master
            mine = parameter.detach().reshape(-1)[start : start + values.numel()]
            differs = (values.to(mine.dtype) != mine) & values.isfinite()
            self._found[gemm.name, "master"] = 0, differs.any().long()

    def _before_step(self, optimizer: Any) -> None:
        for stepped in () if self._alone else list_optimizer_weights(optimizer, self._gemms):
            if (grad := _whole_gradient(stepped.weight)) is not None:
                self.add_tensor(stepped.name, "weight_gradient", grad)

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each checksum by the result of `to`."""
        self._found = {key: (part, to(found)) for key, (part, found) in self._found.items()}

    def collect_checksums(self) -> Checksums:
        """Return the number of each part and 31 bits of its checksum, by (layer, what)."""
        return {
            key: (part, int(found) if key[1] == "master" else _folded(int(found)))
            for key, (part, found) in self._found.items()
        }


def _whole_gradient(weight: Any) -> torch.Tensor | None:
    """Return an optimizer's gradient if each rank has the whole gradient. Ranks of a sharded optimizer have no copies."""
    if is_optimizer_state_sharded(weight):
        return None
    main = getattr(weight, "main_grad", None)
    if main is not None:
        sharded = getattr(weight, "main_param_sharded", False) or getattr(weight, "main_param", None) is None
        return None if sharded else take_local_part(main)
    grad = getattr(weight, "grad", None)
    return None if grad is None or is_dtensor(grad) or grad.shape != weight.shape else grad


def _folded(checksum: int) -> int:
    return ((checksum >> 33) ^ checksum) & 0x7FFFFFFF

"""Observe gradients of weights: their size, and how many of their values are zero or not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...capture.device_to_host import Move
from ...capture.operands import OperandAccumulator
from ...capture.tensors import take_local_part
from ...capture.weight_gradients import WatchedWeight, WeightGradient
from ...core.keys import Key
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, FeatureObservation, Lanes
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver
from .table import TABLES


@dataclass(eq=False)
class _Batch:
    """Measurements of tensors that were measured together, with one value for each tensor."""

    norms: torch.Tensor
    nonzero: torch.Tensor
    nonfinite: torch.Tensor


@dataclass(frozen=True)
class GradientSize:
    """The size of a gradient, or of a rank's part of it. Sizes of parts add up to the size of the whole gradient."""

    #: sum of squares, NaN if a value is not finite or the squares exceed float32
    squares: float
    zeros: int
    nonfinite: int
    elements: int


class GradientSizes:
    """Sizes of this rank's gradients in one sampled step, by GEMM name. A new measurement replaces an earlier one."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[_Batch, int, int]] = {}

    def measure_gradients(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Measure tensors, replacing earlier measurements, without host synchronization on a device."""
        groups = defaultdict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]](list)
        for name, x in tensors:
            groups[x.device, x.dtype].append((name, x))
        for members in groups.values():
            batch = _measure([x for _, x in members])
            self._found |= {name: (batch, i, x.numel()) for i, (name, x) in enumerate(members)}

    def drop_gradient(self, name: str) -> None:
        """Forget a gradient that is not complete."""
        self._found.pop(name, None)

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by the result of `to`."""
        for batch in {id(batch): batch for batch, _, _ in self._found.values()}.values():
            batch.norms, batch.nonzero, batch.nonfinite = to(batch.norms), to(batch.nonzero), to(batch.nonfinite)

    def read_sizes_by_name(self) -> dict[str, GradientSize]:
        """Return the sizes by name. Wait for the device if the sizes are still on it."""
        batches = {id(batch): batch for batch, _, _ in self._found.values()}
        values = {key: (b.norms.tolist(), b.nonzero.tolist(), b.nonfinite.tolist()) for key, b in batches.items()}
        found = {}
        for name, (batch, i, elements) in self._found.items():
            norm, nonzero, nonfinite = (column[i] for column in values[id(batch)])
            is_known = np.isfinite(norm) and (norm > 0 or not nonzero)
            found[name] = GradientSize(norm**2 if is_known else np.nan, elements - nonzero, nonfinite, elements)
        return found


def _measure(xs: Sequence[torch.Tensor]) -> _Batch:
    """Return the sizes of tensors with the same device and dtype."""
    dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    norms = torch.stack(torch._foreach_norm(list(xs), 2, dtype))
    if xs[0].device.type != "cpu":
        nonfinite = [torch.count_nonzero(x * 0) for x in xs]  # the product is NaN if x is not finite
        return _Batch(norms, torch.stack([torch.count_nonzero(x) for x in xs]), torch.stack(nonfinite))
    # NumPy counts booleans ten times as fast as torch. If a norm is finite, all values are finite.
    nonzero = torch.tensor([np.count_nonzero(x.bool().numpy()) for x in xs])
    finite = zip(norms.isfinite().tolist(), xs, strict=True)
    return _Batch(norms, nonzero, torch.tensor([0 if known else int((~x.isfinite()).sum()) for known, x in finite]))


#: sums over ranks for each gradient: parts expected, parts counted, and a `GradientSize`
_COLUMNS = ("due", "parts", "squares", "zeros", "nonfinite", "elements")
_LANE = 7


def make_observation(setup: RunSetup) -> GradientObservation | None:
    """Return the observation of gradients, or None if it is not enabled."""
    return GradientObservation(setup) if setup.config.gradients else None


@dataclass(frozen=True)
class GradientsOfRank:
    """The gradients that one rank has counted."""

    #: names of the GEMMs for whose gradients this rank should count a part
    due: Collection[str] = ()
    sizes: Mapping[str, GradientSize] = field(default_factory=dict)


class GradientStep(StepObserver):
    """The observer of gradients in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        self._sizes = GradientSizes()
        weights = step.gradients.add_watcher(self._see)
        self._weights: Mapping[str, WatchedWeight] = {one.names[0]: one for one in weights}

    def _see(self, found: Sequence[WeightGradient]) -> None:
        counted = list[tuple[str, torch.Tensor]]()
        for names, x in found:
            if x is None:
                self._sizes.drop_gradient(names[0])
            elif self._weights[names[0]].counts_gradient(x):
                counted.append((names[0], take_local_part(x).detach()))
        self._sizes.measure_gradients(counted)

    def move_tensors(self, to: Move) -> None:
        """See `StepObserver`."""
        self._sizes.move_tensors(to)

    def collect_rank_gradients(self) -> GradientsOfRank:
        """Return what this rank counted."""
        sizes = self._sizes.read_sizes_by_name()
        return GradientsOfRank({name for name, one in self._weights.items() if name in sizes or one.expects_gradient}, sizes)


class GradientObservation(FeatureObservation):
    """Sizes of gradients, summed over ranks. A gradient with a missing part has no row."""

    name = "gradients"

    def __init__(self, setup: RunSetup) -> None:
        self._names = setup.gemm_names

    def start_observer(self, step: OpenStep) -> GradientStep:
        """See `FeatureObservation`."""
        return GradientStep(step)

    def collect_results(self, mine: GradientStep | None, operands: Sequence[OperandAccumulator]) -> GradientsOfRank:
        """See `FeatureObservation`."""
        return mine.collect_rank_gradients() if mine else GradientsOfRank()

    def pack_results(self, plan: AgreedSampleSettings, found: GradientsOfRank | None, expected: Collection[Key]) -> Arrays:
        """See `FeatureObservation`."""
        found = found or GradientsOfRank()
        rows = np.zeros((len(self._names), len(_COLUMNS)))
        for row, name in zip(rows, self._names, strict=True):
            row[0] = name in found.due
            if (size := found.sizes.get(name)) is not None:
                row[1:] = 1, size.squares, size.zeros, size.nonfinite, size.elements
        return {"rows": rows}

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `FeatureObservation`."""
        return {_LANE: torch.tensor(packed["rows"]).flatten()}

    def combine_all_ranks(
        self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor
    ) -> Mapping[str, tuple[float, ...]]:
        """Return the sums of each complete gradient."""
        rows = zip(self._names, sums[_LANE].view(-1, len(_COLUMNS)).tolist(), strict=True)
        return {name: tuple(row[1:]) for name, row in rows if row[1] and row[1] == row[0]}

    def compute_single_rank_result(self, found: GradientsOfRank) -> Mapping[str, tuple[float, ...]]:
        """See `FeatureObservation`."""
        return {name: (1, s.squares, s.zeros, s.nonfinite, s.elements) for name, s in found.sizes.items()}

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        found: Mapping[str, tuple[float, ...]] = sampled.whole[self.name]
        layers = [name for name in self._names if name in found]
        if not layers:
            return {}
        parts, squares, zeros, nonfinite, elements = zip(*(found[name] for name in layers), strict=True)
        return {
            TABLES[0].name: {
                "layer": layers,
                "gemm": [sampled.kinds[name] for name in layers],
                "norm": [None if math.isnan(square) else square**0.5 for square in squares],
                "weight_norm": [sampled.norms.get((name, "weight")) for name in layers],
                "zeros": [int(n) for n in zeros],
                "nonfinite": [int(n) for n in nonfinite],
                "elements": [int(n) for n in elements],
                "ranks": [int(n) for n in parts],
            }
        }

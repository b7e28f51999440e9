"""Collect an operand's data in a sampled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ..kernels import MeasurementRequest, ValueStats, add_to_histogram, count_histogram, count_nonfinite, measure_values
from ..numerics.block_scaling import BlockScalingRule
from ..numerics.histogram import DTYPES, Histogram
from ..numerics.metrics import MomentsFound, QuantizationSums, SumsFound, ValueMoments, merge_moments
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import CastInUse, FrameworkBackend
from .gemms import Gemm
from .tensors import take_local_part

#: largest number of separate histograms of an operand. We keep them separate because their scales may differ. Further calls
#: are measured immediately, so that device memory does not grow with the number of micro-batches
KEPT_APART = 2
MEASURED = (*DTYPES, torch.float32)


@dataclass
class OperandAccumulator:
    """The data of one operand of one GEMM in one step, summed over all micro-batches and calls."""

    gemm: Gemm
    role: str
    #: cast of calls whose own cast is unknown
    in_use: CastInUse
    #: what-if recipes. If a histogram is not enough to evaluate a recipe, we measure each tensor immediately
    what_if: Sequence[Recipe] = ()
    #: returns whether this rank counts its tensor. If ranks have copies, only one of them counts the tensor
    is_counted: Callable[[torch.Tensor], bool] = lambda x: True
    #: dtype of the observed tensor
    dtype: torch.dtype | None = None
    #: histograms with one scale each, and the cast of each. Calls with the same scale share a histogram. If the scale
    #: depends on the tensor, each call has its own histogram
    histograms: list[Histogram] = field(default_factory=list)
    casts: list[CastInUse] = field(default_factory=list)
    #: histogram of all further calls; and, for each of these calls, the cast and the sums under its scale
    rest: Histogram | None = None
    rest_casts: list[CastInUse] = field(default_factory=list)
    rest_sums: list[QuantizationSums] = field(default_factory=list)
    #: measurements of float32 operands without a histogram, one row for each call
    moments: list[MomentsFound] = field(default_factory=list)
    #: sums for float32 operands and for block recipes, computed without a histogram, one row for each call
    sums: list[SumsFound] = field(default_factory=list)
    #: by name of a what-if recipe: sums under this recipe, one row for each call, computed without a histogram
    what_if_sums: dict[str, list[SumsFound]] = field(default_factory=dict)
    #: whether to measure the copy that another GEMM uses as its operand; the cast and the sums of each call's copy
    measures_copies: bool = False
    copy_casts: list[CastInUse] = field(default_factory=list)
    copy_sums: list[SumsFound] = field(default_factory=list)
    #: whether to count block scales; their counts, from `count_block_scales`
    counts_block_scales: bool = False
    block_scales: torch.Tensor | None = None
    #: other sums over all calls that cannot be computed from a histogram, such as for `activations`: float64, or None
    further: torch.Tensor | None = None
    calls: int = 0
    #: number of calls whose tensor another rank counts
    copies: int = 0
    #: whether to measure float32 values also under what-if recipes whose scale depends on the tensor
    tries_current: ClassVar[bool] = False
    #: for each call, its place in the order of execution, and the number of non-finite values in this call or in all calls
    #: so far. The number is None if the call's moments, or the histogram of the only call, contain it
    _nonfinite: list[tuple[int, torch.Tensor | int | None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """(layer, role) of the operand."""
        return self.gemm.name, self.role

    def add_tensor(self, x: torch.Tensor, order: int, use: CastInUse | None = None) -> None:
        """Add another tensor to the data. Keep no reference to the tensor.

        Args:
            order: place of the call in the step's order of execution.
            use: cast in this call, if known.
        """
        if self.role == "weight" and (self.calls or self.copies):
            return  # every micro-batch multiplies the same weight
        part_of_others = use is not None and use.decoded is not None and not x.numel()
        if part_of_others or not self.is_counted(x):
            self.copies += 1
            return
        if x.dtype not in MEASURED:
            raise TypeError(f"it is {x.dtype}, which FP8 does not replace; bfloat16, float16 and float32 are measured")
        if self.dtype not in (None, x.dtype):
            raise TypeError(f"it is {self.dtype} in one call and {x.dtype} in another of the same step")
        x, use = take_local_part(x).detach(), use or self.in_use
        copy = use.columnwise if self.measures_copies and use.decoded is None else None
        self._count_nonfinite()
        counted = self._count(x, use)
        joins_rest = self.rest is not None
        if (
            self.what_if
            or copy
            or joins_rest
            or use.decoded
            or x.dtype not in DTYPES
            or isinstance(use.scale, BlockScalingRule)
        ):
            tried, copied = (self.what_if, self.tries_current), None if copy is None else copy.cast_rule
            asked = MeasurementRequest(
                self.role, use.cast_rule, use.decoded, *tried, copied, self.counts_block_scales, joins_rest
            )
            self._keep(measure_values(x, counted, asked), use, copy)
        self._nonfinite.append((order, count_nonfinite(counted) if self.calls and not self.moments else None))
        self.dtype = x.dtype
        self.calls += 1

    def add_call_sums(self, sums: torch.Tensor) -> None:
        """Add the sums of one more call, float64. They have the same length in each call."""
        self.further = sums if self.further is None else self.further + sums

    def _count(self, x: torch.Tensor, use: CastInUse) -> Histogram:
        """Count a call. Return its own histogram, or one that several calls share if no what-if recipe has blocks."""
        joins = self.casts and not self.rest and _one_scale(use, self.casts[-1], x.dtype)
        if joins and not any(isinstance(recipe.scaling, BlockScalingRule) for recipe in self.what_if):
            add_to_histogram(self.histograms[-1], x)
            return self.histograms[-1]
        mine = count_histogram(x)
        if joins:
            self.histograms[-1].counts += mine.counts
        elif len(self.histograms) < KEPT_APART or x.dtype not in DTYPES:
            self.histograms.append(mine)
            self.casts.append(_without_codes(use))
        elif self.rest is None:
            self.rest = mine
        else:
            self.rest.counts += mine.counts
        return mine

    def _keep(self, found: ValueStats, use: CastInUse, copy: CastInUse | None) -> None:
        """Keep the measurements of a call's values."""
        if found.moments is not None:
            self.moments.append(found.moments)
        if found.sums is not None:
            self.sums.append(found.sums)
        if found.scale is not None:
            self.rest_casts.append(use if found.scale is use.scale else replace(use, scale=found.scale))
        if found.sums_of_counts is not None:
            self.rest_sums.append(found.sums_of_counts)
        if found.block_scales is not None:
            known = self.block_scales
            self.block_scales = found.block_scales if known is None else known + found.block_scales
        for name, sums in found.what_if.items():
            self.what_if_sums.setdefault(name, []).append(sums)
        if found.copy is not None and copy is not None:
            self.copy_casts.append(copy)
            self.copy_sums.append(found.copy)

    def _count_nonfinite(self) -> None:
        """Note the first call's non-finite values before other calls share its histogram. Do not wait for the device."""
        if self.calls == 1 and not self.moments:
            self._nonfinite = [(order, count_nonfinite(self.histograms[0])) for order, _ in self._nonfinite]

    @property
    def nonfinite_order(self) -> int | None:
        """Place in the order of execution of the first call with NaN or infinity, if there is one."""
        self._count_nonfinite()
        direct = [m.summed_row for m in self.moments]
        counts = [(order, direct[i].nan + direct[i].inf if n is None else n) for i, (order, n) in enumerate(self._nonfinite)]
        return min((order for order, count in counts if count > 0), default=None)

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each collected tensor by the result of `to`."""
        for counted in self._kept():
            counted.counts = to(counted.counts)
        self.casts, self.rest_casts = [_moved(u, to) for u in self.casts], [_moved(u, to) for u in self.rest_casts]
        self.moments = [m.moved(to) for m in self.moments]
        self.sums, self.rest_sums = [s.moved(to) for s in self.sums], [s.moved(to) for s in self.rest_sums]
        self.copy_sums = [s.moved(to) for s in self.copy_sums]
        self.block_scales = None if self.block_scales is None else to(self.block_scales)
        self.further = None if self.further is None else to(self.further)
        self.what_if_sums = {name: [s.moved(to) for s in sums] for name, sums in self.what_if_sums.items()}
        self._nonfinite = [(order, to(n) if isinstance(n, torch.Tensor) else n) for order, n in self._nonfinite]

    def add_up_kernel_sums(self) -> None:
        """Add up partial sums of kernels, on the device where they are."""
        self.moments = [m.summed_row for m in self.moments]
        self.sums, self.copy_sums = [s.summed_row for s in self.sums], [s.summed_row for s in self.copy_sums]
        self.what_if_sums = {name: [s.summed_row for s in sums] for name, sums in self.what_if_sums.items()}

    @property
    def total_moments(self) -> ValueMoments | None:
        """Measurements (`moments`) of all calls together, as one row in host memory."""
        return merge_moments(ValueMoments.concat([m.summed_row for m in self.moments]).cpu()) if self.moments else None

    @property
    def device(self) -> torch.device | None:
        """Device of the operand's histograms."""
        return self.histograms[0].counts.device if self.histograms else None

    @property
    def is_scale_deferred(self) -> bool:
        """True if all calls share one scale, which we compute after the step from the amax of the whole operand."""
        return all(map(_follows_the_whole, self.casts)) and not self.sums

    @functools.cached_property
    def total_histogram(self) -> Histogram:
        """The histogram of all calls together. Do not add calls afterwards."""
        first, *others = self._kept()
        return sum(others, first)

    def _kept(self) -> list[Histogram]:
        return [*self.histograms, *([self.rest] if self.rest else [])]


def _moved(use: CastInUse, to: Callable[[torch.Tensor], torch.Tensor]) -> CastInUse:
    return replace(use, scale=to(use.scale)) if isinstance(use.scale, torch.Tensor) else use


def _without_codes(use: CastInUse) -> CastInUse:
    return use if use.decoded is None else replace(use, decoded=None)


def _follows_the_whole(use: CastInUse) -> bool:
    """Return True for current scaling outside an engine. This scale does not depend on how ranks split the operand."""
    return use.source != "engine" and isinstance(use.scale, CurrentScaling)


def _one_scale(use: CastInUse, other: CastInUse, dtype: torch.dtype) -> bool:
    """Return True if two calls certainly have the same scale. Do not read from a device, which would block the run."""
    if use is other and isinstance(use.scale, torch.Tensor):
        return True
    if _follows_the_whole(use) and _follows_the_whole(other):
        return dtype in DTYPES and use == other  # float32 is measured immediately
    if not isinstance(use.scale, torch.Tensor) or not isinstance(other.scale, torch.Tensor):
        return False
    return use.format == other.format and use.scale.device.type == "cpu" and bool(use.scale == other.scale)


#: backend for modules that we do not observe as GEMMs
NO_GEMM = FrameworkBackend("no GEMM", lambda module: False, lambda *_: None, lambda *_: None, lambda out: out)


class UncastAccumulator(OperandAccumulator):
    """The data of a tensor that no GEMM casts. What-if recipes whose scale depends on the tensor also apply to float32."""

    tries_current = True

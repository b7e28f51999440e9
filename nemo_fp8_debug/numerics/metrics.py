"""Compute all metrics, from moments (of a tensor before any scale) and quantization sums (under a scale and a format).

Moments and sums come from histograms, or directly from a float32 tensor, with the same meaning. All sums are float64, and
all counts are int64. Formulas: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar

import torch

from .formats import SCALE_ROUNDING, DecodedCodes, FloatFormat, decode_codes, saturating_cast
from .histogram import LANES, Histogram, HistogramBatch, compute_bin_magnitudes, count_lane_groups
from .metric_names import METRICS as METRICS
from .metric_names import WORSE as WORSE

_T = TypeVar("_T", bound="_Columns")


@dataclass(frozen=True)
class _Columns:
    """A table of tensors that all have length B, with one row for each operand."""

    @classmethod
    def concat(cls: type[_T], parts: Sequence[_T]) -> _T:
        """Return the rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def row(self: _T, i: int) -> _T:
        """Return row i as a table of one row."""
        return self.rows(slice(i, i + 1))

    def each(self: _T) -> list[_T]:
        """Return all rows, each as a table of one row."""
        return [type(self)(*row) for row in zip(*(getattr(self, f.name).split(1) for f in fields(self)), strict=True)]

    def rows(self: _T, index: torch.Tensor | slice) -> _T:
        """Return the rows with these numbers (int64 [C]) or in this slice."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    def cpu(self: _T) -> _T:
        """Return the same rows in host memory."""
        return self.moved(lambda column: column.cpu())

    def moved(self: _T, to: Callable[[torch.Tensor], torch.Tensor]) -> _T:
        """Return the same rows after applying `to` to each column."""
        return type(self)(*(to(getattr(self, f.name)) for f in fields(self)))

    @property
    def summed_row(self: _T) -> _T:
        """The object itself, because nothing is left to add up."""
        return self


@dataclass(frozen=True)
class DeferredRowSum(Generic[_T]):
    """One row, as the parts that a kernel wrote.

    We add up the parts later, because launching additions now would cost the host as much time as launching the kernel.
    """

    parts: torch.Tensor
    add_up: Callable[[torch.Tensor], _T]

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> DeferredRowSum[_T]:
        """Return the same row after applying `to` to its parts."""
        return DeferredRowSum(to(self.parts), self.add_up)

    @property
    def summed_row(self) -> _T:
        """The row, added up on the device of its parts."""
        return self.add_up(self.parts)


@dataclass(frozen=True)
class ValueMoments(_Columns):
    """Statistics of a tensor before any scale, over its finite values, except for the counts of NaN and infinity."""

    n: torch.Tensor  #: int64, number of finite values
    nan: torch.Tensor  #: int64
    inf: torch.Tensor  #: int64
    amax: torch.Tensor  #: largest magnitude; 0 for an empty or all-zero tensor
    amin: torch.Tensor  #: smallest non-zero magnitude, or NaN if all values are zero
    median: torch.Tensor  #: median magnitude of the non-zero values (the lower of two middle values), or NaN
    sum_x2: torch.Tensor
    sum_x4: torch.Tensor

    def with_median(self, median: torch.Tensor) -> ValueMoments:
        """Return the same moments with another median."""
        return replace(self, median=median)


@dataclass(frozen=True)
class QuantizationSums(_Columns):
    """Sums over a tensor's finite values x and q = cast(x * scale) / scale. The sums of its parts add up to these."""

    underflows: torch.Tensor  #: int64, x != 0 and q == 0
    overflows: torch.Tensor  #: int64, |x| * scale > format max, by more than the rounding of the scale itself
    sum_error2: torch.Tensor  #: sum (x - q)^2
    sum_xq: torch.Tensor
    sum_q2: torch.Tensor

    def sum_rows_by_owner(self, owner: torch.Tensor, n: int) -> QuantizationSums:
        """Return n rows. Row i sums the rows whose `owner` is i. `owner` is int64 [B]."""

        def add(column: torch.Tensor) -> torch.Tensor:
            return torch.zeros(n, dtype=column.dtype, device=column.device).index_add_(0, owner, column)

        return QuantizationSums(*(add(getattr(self, f.name)) for f in fields(self)))

    def sum_rows(self) -> QuantizationSums:
        """Return the sum of all rows as one row."""
        if len(self.underflows) == 1:
            return self
        return self.sum_rows_by_owner(torch.zeros_like(self.underflows), 1)


#: result of a kernel: a row, or parts of a row on a device
MomentsFound = ValueMoments | DeferredRowSum[ValueMoments]
SumsFound = QuantizationSums | DeferredRowSum[QuantizationSums]


def sum_over_calls(parts: Sequence[SumsFound]) -> QuantizationSums:
    """Return the total of a tensor's sums over all its calls, as one row in host memory."""
    return QuantizationSums.concat([part.summed_row.cpu() for part in parts]).sum_rows()


def compute_histogram_moments(batch: HistogramBatch) -> ValueMoments:
    """Return the moments of B histograms."""
    x, weights = batch.bin_magnitudes.double(), batch.bin_counts
    squares = x * x
    total = batch.sum_bins(weights).long()
    first = batch.bin_starts

    # Bins are in ascending order of magnitude, zero first. An index past the end gives NaN.
    padded = torch.cat([x, x.new_full((1,), torch.nan)])
    has_zeros = (batch.bin_ends > first) & (padded[first] == 0)
    zeros = torch.where(has_zeros, torch.cat([batch.counts, batch.counts.new_zeros(1)])[first], 0)
    nonzero = total - zeros
    # With running counts over all histograms, one search gives every median.
    before = total.cumsum(0) - total
    middle = torch.searchsorted(batch.counts.cumsum(0), before + zeros + (nonzero + 1) // 2)
    there = nonzero > 0

    def at(place: torch.Tensor) -> torch.Tensor:
        return torch.where(there, padded[place.clamp_max(len(x))], torch.nan)

    return ValueMoments(
        n=total,
        nan=batch.nan,
        inf=batch.inf,
        amax=batch.amax().double(),
        amin=at(first + has_zeros),
        median=at(middle),
        sum_x2=batch.sum_bins(weights * squares),
        sum_x4=batch.sum_bins(squares.square_().mul_(weights)),
    )


def quantization_sums_of_histograms(
    batch: HistogramBatch, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> QuantizationSums:
    """Return the sums of B histograms, each under its own scale and format.

    Args:
        scale: float32 [B].
        formats: B formats.
    """
    scales = batch.expand_to_bins(scale)
    scaled = batch.bin_magnitudes * scales
    code, overflows, start = torch.empty_like(scaled), torch.empty_like(scaled, dtype=torch.bool), 0
    for fmt, same in groupby(zip(formats, batch.lengths, strict=True), key=itemgetter(0)):
        end = start + LANES * sum(count_lane_groups(length) for _, length in same)
        code[start:end] = decode_codes(saturating_cast(scaled[start:end], fmt), fmt)
        overflows[start:end] = exceeds_format(scaled[start:end], fmt)
        start = end
    q = code.double().div_(scales)
    return compute_value_sums(batch.bin_magnitudes, overflows, q, batch.bin_counts, batch.sum_bins)


def exceeds_format(scaled: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return whether scaled float32 values exceed the format's max by more than the rounding error of the scale."""
    return scaled.abs() > fmt.overflow_limit


def compute_value_sums(
    x: torch.Tensor,
    beyond: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor | float,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> QuantizationSums:
    """Return the quantization sums of values and the values of their codes.

    Args:
        x: finite values, float32.
        beyond: bool, whether each scaled value was beyond the format's range.
        q: value of x's code, float64.
        weights: float64, how often each value occurs.
        total: function that adds up the values of each row of the result.
    """
    lost = q == 0
    # If a block's stored scale rounds to zero, its codes represent zero. Its values count as underflows, not overflows.
    overflows, underflows = beyond & ~lost, lost & (x != 0)
    x = x.double()
    error, weighted = x - q, weights * q
    return QuantizationSums(
        underflows=total(weights * underflows).long(),
        overflows=total(weights * overflows).long(),
        # In place, because new memory costs more than the computation.
        sum_error2=total(error.square_().mul_(weights)),
        sum_xq=total(x.mul_(weighted)),
        sum_q2=total(weighted.mul_(q)),
    )


def quantization_sums_of_counts(histogram: Histogram, scale: torch.Tensor, fmt: FloatFormat) -> QuantizationSums:
    """Return the sums of a histogram under a float32 scalar scale as one row on its device, without host synchronization."""
    counts, end = histogram.counts, histogram.infinity_bin
    x = compute_bin_magnitudes(histogram.dtype, counts.device)[:end]
    scaled = x * scale.to(x.device)
    q = saturating_cast(scaled, fmt).double() / scale.to(x.device).double()
    return compute_value_sums(x, exceeds_format(scaled, fmt), q, counts[:end].double(), lambda v: v.sum()[None])


#: values of a float32 tensor that are processed at once; bounds the float64 temporaries to some tens of MiB
_CHUNK = 1 << 20


def _chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = x.detach().reshape(-1)
    return (flat,) if flat.numel() <= _CHUNK else flat.split(_CHUNK)


def compute_float32_moments(x: torch.Tensor) -> ValueMoments:
    """Return the moments of a float32 tensor as one row on its device, without host synchronization. The median is NaN."""
    parts = [_moments_of_chunk(chunk) for chunk in _chunks(x)]
    return parts[0] if len(parts) == 1 else merge_moments(ValueMoments.concat(parts))


def _moments_of_chunk(x: torch.Tensor) -> ValueMoments:
    magnitude = x.abs()
    finite = magnitude.isfinite()
    kept = torch.where(finite, magnitude, 0.0)
    padded = torch.cat([kept, kept.new_zeros(1)])
    squares = kept.double() ** 2
    return ValueMoments(
        n=finite.sum()[None],
        nan=magnitude.isnan().sum()[None],
        inf=magnitude.isinf().sum()[None],
        amax=padded.amax().double()[None],
        amin=_or_nan(torch.where(padded > 0, padded, torch.inf).amin().double()[None]),
        median=squares.new_full((1,), torch.nan),
        sum_x2=squares.sum()[None],
        sum_x4=(squares**2).sum()[None],
    )


def _or_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isinf(), torch.nan, x)


def merge_moments(parts: ValueMoments) -> ValueMoments:
    """Return the moments of a tensor (one row) from the moments of its parts. The median cannot be derived and is NaN."""
    if len(parts.n) == 1:
        return parts.with_median(torch.full_like(parts.amax, torch.nan))
    return ValueMoments(
        n=parts.n.sum()[None],
        nan=parts.nan.sum()[None],
        inf=parts.inf.sum()[None],
        amax=parts.amax.amax()[None],
        amin=_or_nan(parts.amin.nan_to_num(torch.inf).amin()[None]),
        median=torch.full_like(parts.amax[:1], torch.nan),
        sum_x2=parts.sum_x2.sum()[None],
        sum_x4=parts.sum_x4.sum()[None],
    )


def compute_amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude (0 if empty), ignoring NaN, as a float32 scalar tensor, without host synchronization."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.detach().abs().nan_to_num(0.0, torch.inf).amax().float()


def compute_finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude, in the form that `compute_amax` returns."""
    return compute_amax(torch.where(x.detach().isfinite(), x.detach(), 0))


def quantization_sums_of_float32(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> QuantizationSums:
    """Return the sums of a float32 tensor under a float32 scalar scale as one row on its device, without waiting for it."""

    def of(chunk: torch.Tensor) -> QuantizationSums:
        x = torch.where(chunk.isfinite(), chunk, 0.0)  # zero adds nothing to any sum
        scaled = x * scale
        code = saturating_cast(scaled, fmt).float()
        q = code.double() / scale.double()
        return compute_value_sums(x, exceeds_format(scaled, fmt), q, 1.0, lambda v: v.sum()[None])

    return QuantizationSums.concat([of(chunk) for chunk in _chunks(x)]).sum_rows()


def quantization_sums_of_codes(x: torch.Tensor, stored: DecodedCodes) -> QuantizationSums:
    """Return the sums of values and their codes, as one row on the device of `x`, without host synchronization.

    Args:
        x: float32, with as many values as there are codes.
    """
    values, codes, limits = (part.reshape(-1).split(_CHUNK) for part in (x, stored.values, stored.at_limit))

    def of(x: torch.Tensor, q: torch.Tensor, at_limit: torch.Tensor) -> QuantizationSums:
        finite = x.isfinite() & q.isfinite()
        x, q = (torch.where(finite, part, 0.0) for part in (x, q))
        beyond = at_limit & (x.abs() > q.abs() * SCALE_ROUNDING)
        return compute_value_sums(x, beyond, q.double(), 1.0, lambda v: v.sum()[None])

    return QuantizationSums.concat([of(*parts) for parts in zip(values, codes, limits, strict=True)]).sum_rows()


def compute_metrics(
    moments: ValueMoments, sums: QuantizationSums, scale: torch.Tensor, scale_current: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return all metrics of B operands, float64 [B] each. An unavailable metric is NaN, such as the cosine of zeros.

    Args:
        sums: NaN if no scale is known. Metrics that need a scale are then NaN.
        scale: float32 [B], scales in use. NaN if unknown, or if blocks have scales of their own.
        scale_current: float32 [B], the scale that current scaling would use.
    """
    unknown = sums.sum_q2.isnan() | (moments.n == 0)
    absent = torch.tensor(torch.nan, dtype=torch.float64)

    def known(value: torch.Tensor) -> torch.Tensor:
        return torch.where(unknown, absent, value)

    n = moments.n.double()
    # A ratio with a zero denominator is absent, not infinite.
    power = torch.where(moments.sum_x2 > 0, moments.sum_x2, absent)
    relative_error = (sums.sum_error2 / power).sqrt()
    product = power * torch.where(sums.sum_q2 > 0, sums.sum_q2, absent)
    return {
        "underflow_pct": known(100 * sums.underflows / n),
        "overflow_pct": known(100 * sums.overflows / n),
        "mse": known(sums.sum_error2 / n),
        "relative_error": known(relative_error),
        "sqnr_db": known(-20 * relative_error.log10()),
        "cosine": known(sums.sum_xq / product.sqrt()),
        "scale_ratio_log2": torch.where(moments.amax > 0, (scale.double() / scale_current.double()).log2(), absent),
        "amax": torch.where(moments.n > 0, moments.amax, absent),
        "amin": moments.amin,
        "dynamic_range_log2": (moments.amax / moments.amin).log2(),
        "outlier_log2": (moments.amax / moments.median).log2(),
        "kurtosis": n * moments.sum_x4 / power**2,
    }

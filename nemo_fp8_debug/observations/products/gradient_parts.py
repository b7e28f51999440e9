"""Check that an optimizer's gradient is the sum of the gradients that ranks and micro-batches have computed.

Each rank has k x l values of its own dW and, if it keeps these values, of the reduced dW. Both are summed over ranks, so
that the first rank can compare them. If each summand is rounded at most T times, with unit roundoff u, then
    |G / f - sum C| <= T u / (1 - T u) sum|C|

for any order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). f is the factor
that a framework averages with.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...numerics.product_check import CHECKED, CheckedBlock, ExactBlock, GemmAccumulation, check_product_blocks
from .verification import (
    GRADIENT_NOT_SEEN,
    OF_RANKS,
    OTHER_REDUCTION,
    PARTS_MISSING,
    REASONS,
    REDUCTION,
    ROUNDINGS,
    compute_error_over_bound,
)
from .verification import REDUCED_ROWS as ROWS

_VALUES = ROWS * ROWS
#: largest error from rounding to zero, for float16 and for other dtypes. A framework may divide small values once more
_SMALL, _TINY = {torch.float16: 2.0**-25}, 2.0**-100
_FIRST_REASON = OTHER_REDUCTION
#: numbers that a rank sends in addition to its values:
#: - 1, so that the sum is the number of ranks that take part
#: - the number of ranks that should take part
#: - whether the rank had a backward pass
#: - whether nothing but the factor f multiplies the gradient
#: - how many values of the reduced gradient the rank keeps
#: - the rank's number if it keeps the first value, otherwise 0
#: - the number of rows to compare
#: - the number of columns to compare
#: - a flag for each reason for not comparing
_HEADER = ("ranks", "expected", "passes", "known", "held", "owner", "rows", "columns", *REASONS[_FIRST_REASON:])
#: how many numbers a rank contributes for each part of a weight
NUMBERS = len(_HEADER) + 3 * _VALUES
_EXACT = GemmAccumulation(roundoff=0.0, besides=1.0, bias=1.0)


def compute_summation_error_bound(
    sizes: torch.Tensor, roundings: int, dtypes: Collection[torch.dtype], ranks: int = 1, factor: float = 1.0
) -> torch.Tensor:
    """Return the largest error of a sum, in any order of summation. The result is infinite if there is no bound.

    Args:
        sizes: float64, sums of the magnitudes that this rank adds.
        roundings: largest number of roundings of a summand.
        dtypes: dtypes of the sums.
        ranks: number of ranks with similar magnitudes.
        factor: factor that multiplies sums before they are added to others.

    Example:
        >>> float(compute_summation_error_bound(torch.tensor(8.0).double(), 4, [torch.bfloat16]))
        0.126984...
    """
    part = roundings * max(torch.finfo(dtype).eps / 2 for dtype in dtypes)
    small = roundings * max(_SMALL.get(dtype, _TINY) for dtype in dtypes) / min(factor, 1.0)
    largest = min(torch.finfo(dtype).max for dtype in dtypes)
    bound = sizes * (part / (1 - part) if part < 1 else math.inf) + small
    return torch.where(sizes * ranks < largest, bound, math.inf)


@dataclass(frozen=True)
class GradientOfRank:
    """A rank's part of the gradient of one weight."""

    #: number of the part of the weight. Other ranks may have the same part
    part: int
    #: this rank's dW, and the largest error that this rank causes in the reduced dW, float64 [k, l]
    summand: torch.Tensor
    bound: torch.Tensor
    #: the values of the reduced gradient that this rank keeps, divided by the factor, and zeros elsewhere: float64 [k, l]
    reduced: torch.Tensor
    #: how many of these values this rank keeps, and whether the first value is among them
    held: int
    first: bool
    #: number of ranks that should add up their parts
    expected: int
    #: whether this rank had a backward pass in this step
    passes: bool
    #: whether nothing but the factor f multiplies the gradient
    known: bool
    #: index into `REASONS`
    reason: int = 0

    def collect_sums(self, rank: int) -> torch.Tensor:
        """Return the numbers to be summed over ranks, float64 [`NUMBERS`]."""
        high, wide = self.summand.shape
        header = [1, self.expected, self.passes, self.known, self.held, rank * self.first, high, wide]
        reasons = [float(self.reason == reason) for reason in range(_FIRST_REASON, len(REASONS))]
        row = torch.zeros(NUMBERS, dtype=torch.float64)
        row[: len(_HEADER)] = torch.tensor([*map(float, header), *reasons], dtype=torch.float64)
        values = row[len(_HEADER) :].view(3, _VALUES)
        for place, x in zip(values, (self.summand, self.bound, self.reduced), strict=True):
            place[: x.numel()] = x.flatten()
        return row


@dataclass(frozen=True)
class _Added:
    """Sums over all ranks for one part of a weight's gradient."""

    of: Mapping[str, float]
    exact: torch.Tensor
    bound: torch.Tensor
    reduced: torch.Tensor

    @classmethod
    def read(cls, row: torch.Tensor) -> _Added | None:
        """Read a sum of `GradientOfRank.collect_sums`. Return None if no rank has computed a gradient."""
        of = dict(zip(_HEADER, row[: len(_HEADER)].tolist(), strict=True))
        if not of["passes"]:
            return None
        shape = [round(of[name] / of["ranks"]) for name in ("rows", "columns")]
        values = row[len(_HEADER) :].view(3, _VALUES)[:, : shape[0] * shape[1]].unflatten(1, shape)
        return cls(of, *values)

    @property
    def reason(self) -> int:
        """Why the gradient cannot be checked, an index into `REASONS`."""
        given = [reason for reason in range(_FIRST_REASON, len(REASONS)) if self.of[REASONS[reason]]]
        if given:
            return given[0]
        if self.of["ranks"] ** 2 != self.of["expected"]:  # each rank contributes the number of ranks that it expects
            return PARTS_MISSING
        if self.of["held"] != self.exact.numel():
            return GRADIENT_NOT_SEEN
        return 0 if (self.bound.isfinite() & self.exact.isfinite()).any() else ROUNDINGS

    @property
    def slope(self) -> tuple[float, float]:
        """The slope of the reduced gradient over the exact gradient, and the slope's largest relative error."""
        size = float(self.exact.square().sum())
        error = float((self.exact.abs() * self.bound).sum())
        if not size or not math.isfinite(size + error):
            return math.nan, math.inf
        return float((self.exact * self.reduced).sum()) / size, error / size

    def block(self, factor: float, loose: float) -> CheckedBlock:
        """Return the block to check. Only single values have limits, because only these limits are proven.

        Args:
            factor: unknown factor of the gradient, in addition to the known one.
            loose: largest relative error of this factor.
        """
        bound = (self.bound + self.exact.abs() * loose) / (1 - loose)
        rows, columns = (torch.zeros(n, dtype=torch.float64) for n in self.exact.shape)
        return CheckedBlock(self.reduced / factor, ExactBlock(self.exact, bound, rows, columns, terms=1), _EXACT)

    def found(self, checked: torch.Tensor | None) -> torch.Tensor:
        """Return the result, float64 in the order of `OF_RANKS`.

        Args:
            checked: result in the order of `CHECKED`, or None if the part could not be checked.
        """
        named = dict.fromkeys(OF_RANKS, 0.0)
        named |= {"rank": self.of["owner"], "reason": self.reason, "result_rows": ROWS, "result_columns": ROWS}
        outcome = "ranks_unknown"
        if checked is not None:
            named |= dict(zip(CHECKED, checked.tolist(), strict=True))
            outcome = "ranks_beyond" if compute_error_over_bound(named) > 1 else "ranks_within"
        named |= {outcome: self.of["ranks"], "values_of_all": named["values"]}
        return torch.tensor(list(named.values()), dtype=torch.float64)


def compared(rows: Mapping[str, Sequence[torch.Tensor]]) -> dict[tuple[str, str], torch.Tensor]:
    """Return the worst part of each weight by (layer, `REDUCTION`), float64 in the order of `verification.OF_RANKS`.

    A framework may multiply all gradients by an unknown number, such as its clipping factor. We estimate this common factor
    from all weights. So we do not detect an error that affects all weights alike.

    Args:
        rows: sums over ranks of `GradientOfRank.collect_sums`, a row for each part, by layer.
    """
    added = [(name, one) for name, parts in rows.items() for row in parts if (one := _Added.read(row))]
    factor, loose = _in_common([one for _, one in added if not one.of["known"]])
    blocks = {
        i: one.block(1.0, 0.0) if one.of["known"] else one.block(factor, loose)
        for i, (_, one) in enumerate(added)
        if not one.reason
    }
    checked = _checked(blocks)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for i, (name, one) in enumerate(added):
        row, key = one.found(checked.get(i)), (name, REDUCTION)
        found[key] = row if key not in found or _severity(row) > _severity(found[key]) else found[key]
    return found


def _checked(blocks: Mapping[int, CheckedBlock]) -> dict[int, torch.Tensor]:
    kinds = defaultdict[object, list[int]](list)
    for i, block in blocks.items():
        kinds[block.batch_key].append(i)
    return {
        i: row for of in kinds.values() for i, row in zip(of, check_product_blocks([blocks[i] for i in of]), strict=True)
    }


def _in_common(added: Sequence[_Added]) -> tuple[float, float]:
    """Return a common factor and its largest relative error, from the half of the parts that determine the factor best."""
    slopes = sorted((one.slope for one in added if not one.reason), key=lambda slope: slope[1])
    usable = [slope for slope in slopes[: (len(slopes) + 1) // 2] if slope[1] < 0.5]
    if not usable:
        return 1.0, 0.0
    return statistics.median_low([slope for slope, _ in usable]), usable[-1][1]


def _severity(row: torch.Tensor) -> tuple[float, float]:
    of = dict(zip(OF_RANKS, row.tolist(), strict=True))
    return of["ranks_beyond"] > 0, max(of["value_ratio"], float(of["ranks_unknown"] > 0))


class GradientSums:
    """This rank's contribution to the sums over ranks."""

    def __init__(self, names: Sequence[str], parts: int, rank: int) -> None:
        """
        Args:
            names: names of GEMMs, the same on all ranks.
            parts: largest number of parts of a weight, the same on all ranks.
        """
        self._names, self._parts, self._rank = list(names), parts, rank

    def collect_sums(self, found: Mapping[str, GradientOfRank]) -> torch.Tensor:
        """Return the numbers to be summed over ranks, float64 [names, parts, numbers]."""
        rows = torch.zeros(len(self._names), self._parts, NUMBERS, dtype=torch.float64)
        for row, name in zip(rows, self._names, strict=True):
            if (mine := found.get(name)) is not None and mine.part < self._parts:
                row[mine.part] = mine.collect_sums(self._rank)
        return rows

    def unpack_all_ranks(self, added: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """Return the result for each weight, by (layer, `REDUCTION`), in the order of `verification.OF_RANKS`.

        Weights for which no rank computed a gradient are left out.

        Args:
            added: the sums over all ranks.
        """
        rows = added.view(len(self._names), self._parts, NUMBERS)
        return compared({name: list(parts) for name, parts in zip(self._names, rows, strict=True)})

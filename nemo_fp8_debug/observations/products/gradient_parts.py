"""Whether the gradient that an optimizer steps by is the sum of what ranks and micro-batches have computed.

Each rank knows k x l values of its own dW and, if it keeps them, of the reduced one. Both are added up over ranks as they
are, so that the first rank can compare them. With T roundings at most on the way of a summand, and unit roundoff u,

    |G / f - sum C| <= T u / (1 - T u) sum|C|

for any order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), where f is the
factor that a framework averages with.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...numerics.product_check import CHECKED, Accumulation, Block, Exact, check_blocks
from .verification import (
    GRADIENT_NOT_SEEN,
    OF_RANKS,
    OTHER_REDUCTION,
    PARTS_MISSING,
    REASONS,
    REDUCTION,
    ROUNDINGS,
    error_over_bound,
)
from .verification import REDUCED_ROWS as ROWS

_VALUES = ROWS * ROWS
#: what a rounding to zero may lose, of float16 and of others, whose small values a framework may divide once more
_SMALL, _TINY = {torch.float16: 2.0**-25}, 2.0**-100
_FIRST_REASON = OTHER_REDUCTION
#: of a rank, beside its values: that it takes part, the ranks that have to, whether it had a backward pass, whether the
#: factor is all that its framework multiplies by, how many values of the reduced gradient it has, its number if it has the
#: first of them, the rows and columns that are compared, and why it cannot tell
_HEADER = ("ranks", "expected", "passes", "known", "held", "owner", "rows", "columns", *REASONS[_FIRST_REASON:])
#: numbers that a rank adds for each part of a weight
NUMBERS = len(_HEADER) + 3 * _VALUES
_EXACT = Accumulation(roundoff=0.0, besides=1.0, bias=1.0)


def compute_sum_bound(
    sizes: torch.Tensor, roundings: int, dtypes: Collection[torch.dtype], ranks: int = 1, factor: float = 1.0
) -> torch.Tensor:
    """How far a sum may be off, in any order of summation; infinite if nothing can be told.

    Args:
        sizes: float64, sums of the magnitudes of what this rank adds.
        roundings: on the way of a summand, at the most.
        dtypes: that sums are kept in.
        ranks: that add up as much.
        factor: that sums are multiplied by on the way.

    Example:
        >>> float(compute_sum_bound(torch.tensor(8.0).double(), 4, [torch.bfloat16]))
        0.126984...
    """
    part = roundings * max(torch.finfo(dtype).eps / 2 for dtype in dtypes)
    small = roundings * max(_SMALL.get(dtype, _TINY) for dtype in dtypes) / min(factor, 1.0)
    largest = min(torch.finfo(dtype).max for dtype in dtypes)
    bound = sizes * (part / (1 - part) if part < 1 else math.inf) + small
    return torch.where(sizes * ranks < largest, bound, math.inf)


@dataclass(frozen=True)
class GradientParts:
    """What a rank has of the gradient of one weight."""

    #: of the weight, which other ranks may have too
    part: int
    #: float64 [k, l]: its own dW, and how far the reduced one may be off for it
    summand: torch.Tensor
    bound: torch.Tensor
    #: float64 [k, l]: what it keeps of the reduced gradient, divided by the factor; zero where it keeps none
    reduced: torch.Tensor
    #: values of it that it keeps, and whether the first is among them
    held: int
    first: bool
    #: ranks that have to add up theirs
    expected: int
    #: whether it had a backward pass in this step
    passes: bool
    #: whether the factor is all that the gradient is multiplied by
    known: bool
    #: in `REASONS`
    reason: int = 0

    def numbers(self, rank: int) -> torch.Tensor:
        """float64 [`NUMBERS`], which adds up over ranks."""
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
    """What all ranks have of one part of a weight."""

    of: Mapping[str, float]
    exact: torch.Tensor
    bound: torch.Tensor
    reduced: torch.Tensor

    @classmethod
    def read(cls, row: torch.Tensor) -> _Added | None:
        """Of a sum of `GradientParts.numbers`; None: no rank has computed a gradient."""
        of = dict(zip(_HEADER, row[: len(_HEADER)].tolist(), strict=True))
        if not of["passes"]:
            return None
        shape = [round(of[name] / of["ranks"]) for name in ("rows", "columns")]
        values = row[len(_HEADER) :].view(3, _VALUES)[:, : shape[0] * shape[1]].unflatten(1, shape)
        return cls(of, *values)

    @property
    def reason(self) -> int:
        """Why nothing can be told, as in `REASONS`."""
        given = [reason for reason in range(_FIRST_REASON, len(REASONS)) if self.of[REASONS[reason]]]
        if given:
            return given[0]
        if self.of["ranks"] ** 2 != self.of["expected"]:  # each rank has told how many there ought to be
            return PARTS_MISSING
        if self.of["held"] != self.exact.numel():
            return GRADIENT_NOT_SEEN
        return 0 if (self.bound.isfinite() & self.exact.isfinite()).any() else ROUNDINGS

    @property
    def slope(self) -> tuple[float, float]:
        """Of what was reduced on what is exact, and how far that may be off, as a share of it."""
        size = float(self.exact.square().sum())
        error = float((self.exact.abs() * self.bound).sum())
        if not size or not math.isfinite(size + error):
            return math.nan, math.inf
        return float((self.exact * self.reduced).sum()) / size, error / size

    def block(self, factor: float, loose: float) -> Block:
        """To be checked; nothing but single values has limits, which are proven.

        Args:
            factor: that the gradient is multiplied by beside the one that is known.
            loose: how far that may be off, as a share of it.
        """
        bound = (self.bound + self.exact.abs() * loose) / (1 - loose)
        rows, columns = (torch.zeros(n, dtype=torch.float64) for n in self.exact.shape)
        return Block(self.reduced / factor, Exact(self.exact, bound, rows, columns, terms=1), _EXACT)

    def found(self, checked: torch.Tensor | None) -> torch.Tensor:
        """float64 as `OF_RANKS`.

        Args:
            checked: as `CHECKED`; None: nothing can be told.
        """
        named = dict.fromkeys(OF_RANKS, 0.0)
        named |= {"rank": self.of["owner"], "reason": self.reason, "result_rows": ROWS, "result_columns": ROWS}
        outcome = "ranks_unknown"
        if checked is not None:
            named |= dict(zip(CHECKED, checked.tolist(), strict=True))
            outcome = "ranks_beyond" if error_over_bound(named) > 1 else "ranks_within"
        named |= {outcome: self.of["ranks"], "values_of_all": named["values"]}
        return torch.tensor(list(named.values()), dtype=torch.float64)


def compared(rows: Mapping[str, Sequence[torch.Tensor]]) -> dict[tuple[str, str], torch.Tensor]:
    """By (layer, `REDUCTION`), float64 as `verification.OF_RANKS`: the part of each weight that is worst.

    A framework may multiply all gradients by a number that nobody tells, such as the one that it clips with. It is then
    found from what all weights have in common, and what is wrong with all of them alike is not seen.

    Args:
        rows: by layer, sums over ranks of `GradientParts.numbers`, a row a part.
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


def _checked(blocks: Mapping[int, Block]) -> dict[int, torch.Tensor]:
    kinds = defaultdict[object, list[int]](list)
    for i, block in blocks.items():
        kinds[block.kind].append(i)
    return {i: row for of in kinds.values() for i, row in zip(of, check_blocks([blocks[i] for i in of]), strict=True)}


def _in_common(added: Sequence[_Added]) -> tuple[float, float]:
    """A factor of all, and how far it may be off, from the half of them that tell it best."""
    slopes = sorted((one.slope for one in added if not one.reason), key=lambda slope: slope[1])
    usable = [slope for slope in slopes[: (len(slopes) + 1) // 2] if slope[1] < 0.5]
    if not usable:
        return 1.0, 0.0
    return statistics.median_low([slope for slope, _ in usable]), usable[-1][1]


def _severity(row: torch.Tensor) -> tuple[float, float]:
    of = dict(zip(OF_RANKS, row.tolist(), strict=True))
    return of["ranks_beyond"] > 0, max(of["value_ratio"], float(of["ranks_unknown"] > 0))


class GradientSums:
    """What a rank adds."""

    def __init__(self, names: Sequence[str], parts: int, rank: int) -> None:
        """
        Args:
            names: of GEMMs, the same on all ranks.
            parts: of a weight that ranks may have, the same on all ranks.
        """
        self._names, self._parts, self._rank = list(names), parts, rank

    def rows(self, found: Mapping[str, GradientParts]) -> torch.Tensor:
        """float64 [names, parts, numbers], which add up over ranks."""
        rows = torch.zeros(len(self._names), self._parts, NUMBERS, dtype=torch.float64)
        for row, name in zip(rows, self._names, strict=True):
            if (mine := found.get(name)) is not None and mine.part < self._parts:
                row[mine.part] = mine.numbers(self._rank)
        return rows

    def of_all(self, added: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """By (layer, `REDUCTION`), of all that any rank has computed; as `verification.OF_RANKS`.

        Args:
            added: over all ranks.
        """
        rows = added.view(len(self._names), self._parts, NUMBERS)
        return compared({name: list(parts) for name, parts in zip(self._names, rows, strict=True)})

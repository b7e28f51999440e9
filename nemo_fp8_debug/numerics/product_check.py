"""Check whether a block of a GEMM's output is the product of the GEMM's operands, up to rounding errors.

The block is k rows by l columns of C = A B^T (+ bias). Whole rows of A and of B give its exact values E. A GEMM sums n terms
for each value, in any order, and rounds the sum once to its dtype. If u_s is the unit roundoff of each addition and u the
unit roundoff of the dtype (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1), then:

    |C - E| <= (1 + u) gamma_n sum|a b| + u |E|,    gamma_n = n u_s / (1 - n u_s)

Sums of errors over a row, a column or the block have much narrower limits, because rounding errors of different values are
independent and have no preferred sign. A sum of errors e_i with |e_i| <= s_i exceeds t sqrt(sum s_i^2) with a probability of
at most 2 exp(-t^2 / 2) (Hoeffding 1963). If rows of E are equal except for a power of two, they have the same rounding
errors, so we use only one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: unit roundoff of the result's dtype, and the largest error from rounding a small value to zero
_DTYPES = {
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-126),
    torch.float64: (2.0**-53, 2.0**-1022),
}
#: a float32 operand or sum below this value may be flushed to zero
_FLUSHED = 2.0**-126
#: The t of the formula above. With this value, we expect 0.01 false alarms in a run of 500 GEMMs and 1,000 samples. Each
#: GEMM has three products. Each product has a block of 64 rows and 64 columns. Each row, column and block has two limits.
TIMES = math.sqrt(2 * math.log(2 * 500 * 1000 * 3 * (2 * 128 + 2) / 0.01))
#: number of blocks to check at once, so that their temporaries stay in a cache
_TOGETHER = 8
#: Results for a block, in the order of `check_product_blocks`. A row is hit if one of its values exceeds the value's bound.
#: A row is beyond its limit if the sum of its errors exceeds the limit of the row.
CHECKED = (
    "values",
    "values_beyond",
    "rows_hit",
    "columns_hit",
    "rows_beyond",
    "columns_beyond",
    "value_ratio",
    "row",
    "column",
    "row_ratio",
    "worst_row",
    "column_ratio",
    "worst_column",
    "block_ratio",
    "factor",
    "unchecked",
    "error2",
    "exact2",
)


@dataclass(frozen=True)
class GemmAccumulation:
    """How a GEMM adds up its terms."""

    #: unit roundoff of an addition
    roundoff: float = 2.0**-24
    #: how many terms are added up exactly between two rounded additions
    exact_terms: int = 1
    #: largest error of all sums in the same direction, as a share of sum|a b|, caused by additions that truncate
    bias: float = 0.0
    #: largest further error of each value, as a share of sum|a b|, caused by rounded operands or partial sums in fewer bits
    besides: float = 0.0

    def additions(self, terms: int) -> int:
        """Return the largest number of rounded additions in the sum of one value."""
        return -(-terms // self.exact_terms) + 1

    def gamma(self, terms: int) -> float:
        """Return the error bound of a sum, as a share of sum|a b|. Return infinity if there is no bound."""
        n = self.additions(terms) * self.roundoff
        return n / (1 - n) + self.besides if n < 1 else math.inf

    def compute_error_bound(self, terms: int) -> float:
        """Return the joint bound of the errors of independent additions, as a share of sum|a b|."""
        return self.roundoff * math.sqrt(self.additions(terms)) + self.besides


FLOAT32 = GemmAccumulation()


@dataclass(frozen=True)
class ExactBlock:
    """A block of a product, computed exactly, and the magnitudes that bound the errors of a GEMM."""

    #: float64 [k, l]: the product
    values: torch.Tensor
    #: float32 [k, l]: the product of magnitudes, rounded up
    magnitudes: torch.Tensor
    #: float64 [k] and [l]: sums of the magnitudes of each row of A and of B
    rows: torch.Tensor
    columns: torch.Tensor
    terms: int

    @classmethod
    def from_rows(cls, a: torch.Tensor, b: torch.Tensor, values: torch.Tensor | None = None) -> ExactBlock:
        """Compute the block from rows of A and of B.

        Args:
            a: [k, n], any floating dtype.
            b: [l, n].
            values: float64 [k, l], the exact product, or None if it is not known yet.
        """
        magnitudes, size_a, size_b = _magnitudes(a, b)
        exact = a.double() @ b.double().T if values is None else values
        return cls(exact, magnitudes, size_a.sum(1).double(), size_b.sum(1).double(), a.shape[1])

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> ExactBlock:
        """Return the same block after applying `to` to each tensor."""
        return ExactBlock(to(self.values), to(self.magnitudes), to(self.rows), to(self.columns), self.terms)


@dataclass(frozen=True)
class CheckedBlock:
    """A computed block, and the exact block."""

    #: [k, l], in the dtype that the GEMM returned
    actual: torch.Tensor
    exact: ExactBlock
    how: GemmAccumulation = FLOAT32
    #: bias or earlier result that the GEMM added to the product, [l] or [k, l]; the GEMM may have rounded the product first
    added: torch.Tensor | None = None

    @property
    def batch_key(self) -> tuple[object, ...]:
        """A key that is equal for blocks that can be checked together."""
        return self.actual.shape, self.actual.dtype, self.actual.device, self.added is None

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> CheckedBlock:
        """Return the same block after applying `to` to each tensor."""
        added = None if self.added is None else to(self.added)
        return CheckedBlock(to(self.actual), self.exact.moved(to), self.how, added)


def _magnitudes(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the product of magnitudes, rounded up, float32 [k, l], and the magnitudes of A and B.

    On a CPU we compute in float32, which takes half the time. A sum of positive terms is off by at most n roundings.
    """
    in_float32 = a.device.type == "cpu" and torch.float64 not in (a.dtype, b.dtype)
    in_float32 = in_float32 and torch.get_float32_matmul_precision() == "highest"
    dtype, terms = (torch.float32, a.shape[1]) if in_float32 else (torch.float64, 0)
    size_a, size_b = a.to(dtype).abs(), b.to(dtype).abs()
    rounded_up = 1 + 2.0**-22 + 2.0**-23 * terms
    return ((size_a @ size_b.T) * rounded_up).float(), size_a, size_b


def check_block(
    actual: torch.Tensor, exact: ExactBlock, how: GemmAccumulation = FLOAT32, added: torch.Tensor | None = None
) -> torch.Tensor:
    """Check one block. Return a row of the result of `check_product_blocks`.

    Example:
        >>> a, b = torch.randn(8, 256).bfloat16(), torch.randn(8, 256).bfloat16()
        >>> found = dict(zip(CHECKED, check_block(a @ b.T, ExactBlock.from_rows(a, b)).tolist(), strict=True))
        >>> found["values"], found["values_beyond"], found["value_ratio"] <= 1
        (64.0, 0.0, True)
        >>> wrong = dict(zip(CHECKED, check_block(1.5 * (a @ b.T), ExactBlock.from_rows(a, b)).tolist(), strict=True))
        >>> round(wrong["factor"], 2), wrong["block_ratio"] > 1
        (1.5, True)
    """
    return check_product_blocks([CheckedBlock(actual, exact, how, added)])[0]


def check_product_blocks(blocks: Sequence[CheckedBlock]) -> torch.Tensor:
    """Compare blocks of one kind with their exact blocks. Return float64 [blocks, `CHECKED`], without host synchronization.

    Ratios are error / bound, so correct arithmetic gives at most 1. `factor` is the slope of a regression of the computed
    values on the exact values. We skip a value, and count it as unchecked, if its exact value or its bound is not finite or
    exceeds the dtype's range.
    """
    return torch.cat([_checked(blocks[i : i + _TOGETHER]) for i in range(0, len(blocks), _TOGETHER)])


def _checked(blocks: Sequence[CheckedBlock]) -> torch.Tensor:
    first = blocks[0]
    roundoff, smallest = _DTYPES[first.actual.dtype]

    def each(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=first.actual.device)[:, None, None]

    computed = torch.stack([block.actual for block in blocks]).double()
    expected = torch.stack([block.exact.values for block in blocks])
    sizes = torch.stack([block.exact.magnitudes for block in blocks]).double()
    rows, columns = (torch.stack([getattr(block.exact, name) for block in blocks]) for name in ("rows", "columns"))
    roundings = roundoff * expected.abs()
    if first.added is not None:
        added = torch.stack([block.added for block in blocks if block.added is not None]).double()
        added = added[:, None] if added.dim() == 2 else added
        expected, sizes = expected + added, sizes + added.abs()
        roundings = roundings + roundoff * expected.abs()
    terms = each([block.exact.terms for block in blocks])
    small = _FLUSHED * (rows[:, :, None] + columns[:, None] + terms) + 2 * smallest
    gamma = each([block.how.gamma(block.exact.terms) for block in blocks])
    bound = (1 + roundoff) * gamma * sizes + roundings + small
    usable = bound.isfinite() & ((expected.abs() + bound) < torch.finfo(first.actual.dtype).max)
    error, expected = (torch.where(usable, x, 0) for x in (computed - expected, expected))
    # A value that is not finite but should be has an infinite error.
    error = torch.where(error.isnan(), torch.inf, error)
    ratio = error.abs() / torch.where(usable, bound, 1)
    noise = (
        torch.hypot(roundings, each([block.how.compute_error_bound(block.exact.terms) for block in blocks]) * sizes) + small
    )
    weight = error.isfinite() & _first_of_their_kind(expected)
    error_, expected_, noise_ = (torch.where(weight, x, 0) for x in (error, expected, noise))
    biased = any(block.how.bias for block in blocks)
    bias = torch.where(weight, each([block.how.bias for block in blocks]) * sizes, 0) if biased else None
    of_rows, of_columns, whole = _ratios(error_, expected_, noise_, bias)
    beyond, flat = ratio > 1, ratio.flatten(1)
    worst = flat.argmax(1)
    found = [
        usable.sum((1, 2)),
        beyond.sum((1, 2)),
        beyond.any(2).sum(1),
        beyond.any(1).sum(1),
        (of_rows > 1).sum(1),
        (of_columns > 1).sum(1),
        flat.amax(1),
        worst // ratio.shape[2],
        worst % ratio.shape[2],
        of_rows.amax(1),
        of_rows.argmax(1),
        of_columns.amax(1),
        of_columns.argmax(1),
        whole,
        1 + (error_ * expected_).sum((1, 2)) / expected_.square().sum((1, 2)),
        (~usable).sum((1, 2)),
        error.square().sum((1, 2)),
        expected.square().sum((1, 2)),
    ]
    return torch.stack([x.double() for x in found], 1)


def _ratios(
    error: torch.Tensor, expected: torch.Tensor, noise: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ratios of errors to their limits for rows [blocks, k], columns [blocks, l] and blocks [blocks].

    A row, a column or a block has two ratios, one for the mean and one for the slope of its errors. We return the larger.

    Args:
        error, expected, noise, bias: [blocks, k, l], zero for values that we skip. `bias` is None if there is no bias.
    """
    squares = noise.square()
    means = _of_lines(error, squares, bias)
    slopes = _of_lines(error * expected, squares * expected.square(), None if bias is None else bias * expected.abs())
    rows, columns, whole = (torch.maximum(mean, slope) for mean, slope in zip(means, slopes, strict=True))
    return rows, columns, whole


def _of_lines(error: torch.Tensor, squares: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the ratio of each sum of errors to its limit, for rows, columns and whole blocks."""
    found = []
    for dim in (2, 1, (1, 2)):
        limit = TIMES * squares.sum(dim).sqrt()
        if bias is not None:
            limit = limit + bias.sum(dim)
        found.append(torch.where(limit > 0, error.sum(dim).abs() / limit, 0))
    return found


def _first_of_their_kind(blocks: torch.Tensor) -> torch.Tensor:
    """Return which values to count, bool [blocks, k, l].

    Do not count a row or column that is equal to an earlier one except for its sign and a power of two.
    """
    sizes = blocks.abs()
    rows, columns = (_first(blocks, sizes, dim) for dim in (2, 1))
    return rows[:, :, None] & columns[:, None]


def _first(kept: torch.Tensor, sizes: torch.Tensor, dim: int) -> torch.Tensor:
    """Return which rows (if `dim` is 2) or columns (if `dim` is 1) are not multiples of an earlier row or column."""
    largest = kept.gather(dim, sizes.argmax(dim, keepdim=True)).squeeze(dim)
    # Divide each row's (or column's) weighted sum by its largest value. Multiples by a power of two agree. Other rows or
    # columns agree with negligible probability.
    weights = torch.arange(1, kept.shape[dim] + 1, device=kept.device, dtype=torch.float64).sqrt()
    sums = (kept * (weights if dim == 2 else weights[:, None])).sum(dim)
    told = torch.where(largest == 0, 0, sums / largest)
    same = told[:, :, None] == told[:, None]
    return ~same.tril(-1).any(2)

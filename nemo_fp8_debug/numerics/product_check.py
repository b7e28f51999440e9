"""Whether a block of what a GEMM returned is the product of its operands, up to the rounding that its arithmetic may do.

The block is k rows by l columns of C = A B^T (+ bias); with whole rows of A and of B it is known exactly. Per value, with
n terms, any order of summation and unit roundoff u_s of each addition (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 3.1), rounded once to a dtype with unit roundoff u:

    |C - E| <= (1 + u) gamma_n sum|a b| + u |E|,    gamma_n = n u_s / (1 - n u_s)

Rows, columns and the block as a whole have much narrower limits: roundings of different values are independent and have
no sign of their own, so that a sum of errors e_i with |e_i| <= s_i exceeds t sqrt(sum s_i^2) with a probability of at most
2 exp(-t^2 / 2) (Hoeffding 1963). Rows of E that are the same but for a power of two round alike, and count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: unit roundoff of the result's dtype, and what its rounding to zero may lose of a small value
_DTYPES = {
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-126),
    torch.float64: (2.0**-53, 2.0**-1022),
}
#: below it a float32 operand or sum may be taken as zero
_FLUSHED = 2.0**-126
#: A run of 500 GEMMs and 1,000 samples, whose three products have a block of 64 rows and columns with two limits each, is
#: to expect 0.01 false alarms: how many standard bounds a sum of errors may reach.
TIMES = math.sqrt(2 * math.log(2 * 500 * 1000 * 3 * (2 * 128 + 2) / 0.01))
#: What is known of a block, in the order of `check_blocks`. Rows that are hit have a value beyond its bound, rows that are
#: beyond are so as a whole.
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
class Accumulation:
    """How a GEMM adds up its terms."""

    #: unit roundoff of an addition
    roundoff: float = 2.0**-24
    #: terms that are added up between two such additions, exactly
    exact_terms: int = 1
    #: how far all sums may be off in the same direction, as a share of sum|a b|: additions that truncate
    bias: float = 0.0
    #: how far each value may be off besides, as a share of sum|a b|: operands that are rounded, partial sums in fewer bits
    besides: float = 0.0

    def additions(self, terms: int) -> int:
        """Roundings on the way to one value, at the most."""
        return -(-terms // self.exact_terms) + 1

    def gamma(self, terms: int) -> float:
        """Bound of the error of a sum, as a share of sum|a b|; infinite where the bound does not hold."""
        n = self.additions(terms) * self.roundoff
        return n / (1 - n) + self.besides if n < 1 else math.inf

    def noise(self, terms: int) -> float:
        """What bounds the errors of independent additions together, as a share of sum|a b|."""
        return self.roundoff * math.sqrt(self.additions(terms)) + self.besides


FLOAT32 = Accumulation()


@dataclass(frozen=True)
class Exact:
    """A block of a product, and what bounds the errors of whoever computes it."""

    #: float64 [k, l]: the product
    values: torch.Tensor
    #: float32 [k, l]: the product of magnitudes, rounded up
    magnitudes: torch.Tensor
    #: float64 [k] and [l]: sums of the magnitudes of each row
    rows: torch.Tensor
    columns: torch.Tensor
    terms: int

    @classmethod
    def product(cls, a: torch.Tensor, b: torch.Tensor) -> Exact:
        """Of rows of A and of B.

        Args:
            a: [k, n], any floating dtype.
            b: [l, n].
        """
        a, b = a.double(), b.double()
        size_a, size_b = a.abs(), b.abs()
        magnitudes = (size_a @ size_b.T) * (1 + 2.0**-22)
        return cls(a @ b.T, magnitudes.float(), size_a.sum(1), size_b.sum(1), a.shape[1])

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Exact:
        """With what `to` gives for each tensor."""
        return Exact(to(self.values), to(self.magnitudes), to(self.rows), to(self.columns), self.terms)


@dataclass(frozen=True)
class Block:
    """A block that was computed, and the exact one."""

    #: [k, l], in the dtype that the GEMM returned
    actual: torch.Tensor
    exact: Exact
    how: Accumulation = FLOAT32
    #: [l] or [k, l], what was added to the product; that may have been a rounding of its own
    added: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Blocks of the same kind can be checked together."""
        return self.actual.shape, self.actual.dtype, self.actual.device, self.added is None

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Block:
        """With what `to` gives for each tensor."""
        added = None if self.added is None else to(self.added)
        return Block(to(self.actual), self.exact.moved(to), self.how, added)


def check_block(
    actual: torch.Tensor, exact: Exact, how: Accumulation = FLOAT32, added: torch.Tensor | None = None
) -> torch.Tensor:
    """As `check_blocks`, of one.

    Example:
        >>> a, b = torch.randn(8, 256).bfloat16(), torch.randn(8, 256).bfloat16()
        >>> found = dict(zip(CHECKED, check_block(a @ b.T, Exact.product(a, b)).tolist(), strict=True))
        >>> found["values"], found["values_beyond"], found["value_ratio"] <= 1
        (64.0, 0.0, True)
        >>> wrong = dict(zip(CHECKED, check_block(1.5 * (a @ b.T), Exact.product(a, b)).tolist(), strict=True))
        >>> round(wrong["factor"], 2), wrong["block_ratio"] > 1
        (1.5, True)
    """
    return check_blocks([Block(actual, exact, how, added)])[0]


def check_blocks(blocks: Sequence[Block]) -> torch.Tensor:
    """How blocks of one kind compare with the exact ones: float64 [blocks, `CHECKED`], without host synchronization.

    Ratios are error over bound: 1 is what arithmetic may do, and `factor` is the slope of what was computed on what is
    exact. Values are passed over, and counted as unchecked, whose exact one is not finite or is beyond the dtype.
    """
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
    error = torch.where(usable, computed - expected, 0)
    # What is not finite and ought to be is as wrong as can be.
    error = torch.nan_to_num(error, nan=torch.inf)
    ratio = error.abs() / torch.where(usable, bound, 1)
    noise = torch.hypot(roundings, each([block.how.noise(block.exact.terms) for block in blocks]) * sizes) + small
    weight = usable & error.isfinite()
    weight &= _first_of_its_kind(expected)[:, :, None] & _first_of_its_kind(expected.transpose(1, 2))[:, None]
    bias = each([block.how.bias for block in blocks]) * sizes
    sums = _Sums(*(torch.where(weight, x, 0) for x in (error, expected, noise, bias)))
    of_rows, of_columns, whole = sums.ratios(2), sums.ratios(1), sums.ratios((1, 2))
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
        1 + (sums.expected * sums.error).sum((1, 2)) / sums.expected.square().sum((1, 2)),
        (~usable).sum((1, 2)),
        torch.where(usable, error, 0).square().sum((1, 2)),
        torch.where(usable, expected, 0).square().sum((1, 2)),
    ]
    return torch.stack([x.double() for x in found], 1)


@dataclass(frozen=True)
class _Sums:
    """Errors of blocks, [blocks, k, l] each, zero where they do not count."""

    error: torch.Tensor
    expected: torch.Tensor
    noise: torch.Tensor
    bias: torch.Tensor

    def ratios(self, dim: int | tuple[int, ...]) -> torch.Tensor:
        """Over dimensions: the greater of how a slope and a mean compare with their limits."""
        return torch.maximum(self._ratio(self.expected, dim), self._ratio(None, dim))

    def _ratio(self, weights: torch.Tensor | None, dim: int | tuple[int, ...]) -> torch.Tensor:
        error, noise, bias = self.error, self.noise, self.bias
        if weights is not None:
            error, noise, bias = error * weights, noise * weights, bias * weights.abs()
        limit = TIMES * noise.square().sum(dim).sqrt() + bias.sum(dim)
        return torch.where(limit > 0, error.sum(dim).abs() / limit, 0)


def _first_of_its_kind(rows: torch.Tensor) -> torch.Tensor:
    """bool [blocks, k]: no row before it is the same but for a power of two and its sign."""
    kept = torch.nan_to_num(rows)
    at = kept.abs().argmax(2, keepdim=True)
    largest = kept.gather(2, at)
    _, exponent = torch.frexp(largest)
    normed = torch.ldexp(kept, -exponent) * largest.sign()
    # Rows that are the same have the same sum with any weights; those that are not have it by no chance that counts.
    weights = torch.arange(1, rows.shape[2] + 1, device=rows.device, dtype=torch.float64).sqrt()
    told = (normed * weights).sum(2)
    same = told[:, :, None] == told[:, None]
    return ~same.tril(-1).any(2)

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
#: What is known of a block, in the order of `check_block`. Rows that are hit have a value beyond its bound, rows that are
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


FLOAT32 = Accumulation()


@dataclass(frozen=True)
class Exact:
    """A block of a product in float64, and what bounds the errors of whoever computes it."""

    #: [k, l] each: the product, and the same of magnitudes
    values: torch.Tensor
    magnitudes: torch.Tensor
    #: of what may be lost of operands that are taken as zero
    flushed: torch.Tensor
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
        flushed = _FLUSHED * (size_a.sum(1)[:, None] + size_b.sum(1)[None] + a.shape[1])
        return cls(a @ b.T, size_a @ size_b.T, flushed, a.shape[1])


def check_block(
    actual: torch.Tensor, exact: Exact, how: Accumulation = FLOAT32, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """How a block that was computed compares with the exact one: float64 as `CHECKED`, without host synchronization.

    Ratios are error over bound: 1 is what arithmetic may do, and `factor` is the slope of what was computed on what is
    exact. Values are passed over, and counted as unchecked, whose exact one is not finite or is beyond the dtype.

    Args:
        actual: [k, l], in the dtype that the GEMM returned.
        bias: [l], what was added to the product; that may have been a rounding of its own.

    Example:
        >>> a, b = torch.randn(8, 256).bfloat16(), torch.randn(8, 256).bfloat16()
        >>> found = dict(zip(CHECKED, check_block(a @ b.T, Exact.product(a, b)).tolist(), strict=True))
        >>> found["values"], found["values_beyond"], found["value_ratio"] <= 1
        (64.0, 0.0, True)
        >>> wrong = dict(zip(CHECKED, check_block(1.5 * (a @ b.T), Exact.product(a, b)).tolist(), strict=True))
        >>> round(wrong["factor"], 2), wrong["block_ratio"] > 1
        (1.5, True)
    """
    roundoff, smallest = _DTYPES[actual.dtype]
    computed, expected, sizes = actual.double(), exact.values, exact.magnitudes
    roundings = roundoff * expected.abs()
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
        roundings = roundings + roundoff * expected.abs()
    small = exact.flushed + 2 * smallest
    bound = (1 + roundoff) * how.gamma(exact.terms) * sizes + roundings + small
    usable = bound.isfinite() & ((expected.abs() + bound) < torch.finfo(actual.dtype).max)
    error = torch.where(usable, computed - expected, 0)
    # What is not finite and ought to be is as wrong as can be; the greatest finite number keeps sums of it comparable.
    error = torch.nan_to_num(error, nan=torch.inf)
    bound = torch.where(usable, bound, 1)
    ratio = error.abs() / bound
    of_sums = how.roundoff * math.sqrt(how.additions(exact.terms)) + how.besides
    noise = torch.hypot(roundings, of_sums * sizes) + small
    weight = usable & error.isfinite() & _first_of_its_kind(expected)[:, None] & _first_of_its_kind(expected.T)[None]
    aggregates = _Aggregates(
        torch.where(weight, error, 0),
        torch.where(weight, expected, 0),
        torch.where(weight, noise, 0),
        torch.where(weight, how.bias * sizes, 0),
    )
    rows, columns, whole = aggregates.ratios(1), aggregates.ratios(0), aggregates.ratios(None)
    worst = ratio.flatten().argmax()
    fits = torch.where(weight, expected, 0)
    factor = 1 + (fits * torch.where(weight, error, 0)).sum() / fits.square().sum()
    beyond = ratio > 1
    return torch.stack(
        [
            usable.sum().double(),
            beyond.sum().double(),
            beyond.any(1).sum().double(),
            beyond.any(0).sum().double(),
            (rows > 1).sum().double(),
            (columns > 1).sum().double(),
            ratio.max(),
            (worst // ratio.shape[1]).double(),
            (worst % ratio.shape[1]).double(),
            rows.max(),
            rows.argmax().double(),
            columns.max(),
            columns.argmax().double(),
            whole,
            factor,
            (~usable).sum().double(),
        ]
    )


@dataclass(frozen=True)
class _Aggregates:
    """Errors of a block, zero where they do not count."""

    error: torch.Tensor
    expected: torch.Tensor
    noise: torch.Tensor
    bias: torch.Tensor

    def ratios(self, dim: int | None) -> torch.Tensor:
        """Of rows (1), columns (0) or all: the greater of how a slope and a mean compare with their limits."""
        return torch.maximum(self._ratio(self.expected, dim), self._ratio(torch.ones_like(self.expected), dim))

    def _ratio(self, weights: torch.Tensor, dim: int | None) -> torch.Tensor:
        total = (self.error * weights).sum(dim).abs()
        limit = TIMES * (self.noise * weights).square().sum(dim).sqrt() + (self.bias * weights.abs()).sum(dim)
        return torch.where(limit > 0, total / limit, 0)


def _first_of_its_kind(rows: torch.Tensor) -> torch.Tensor:
    """bool [k]: no row before it is the same but for a power of two and its sign; None of them is if it is zero."""
    size = rows.abs().amax(1, keepdim=True)
    _, exponent = torch.frexp(torch.nan_to_num(size, posinf=1.0))
    normed = torch.ldexp(torch.nan_to_num(rows), -exponent)
    signs = normed.gather(1, normed.abs().argmax(1, keepdim=True)).sign()
    normed = normed * signs
    same = (normed[:, None] == normed[None]).all(2)
    earlier = torch.ones_like(same).tril(-1)
    return ~(same & earlier).any(1)

"""Compute the error that quantized operands cause in the three products of a linear layer, from a part of each output.

Each product is A B^T, a sum along one dimension of the operands. So a few whole rows of A and of B determine a block of
the output exactly:

| product | A | B | summed over |
|---|---|---|---|
| fprop, Y = X W^T | rows of X | rows of W | input features |
| dgrad, dX = dY W | rows of dY | columns of W | output features |
| wgrad, dW = dY^T X | columns of dY | columns of X | tokens |

Under a block recipe, blocks run along the summed dimension, because Transformer Engine quantizes an operand separately for
each product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .block_scaling import BlockScales, BlockScalingRule
from .formats import FloatFormat, saturating_cast
from .metrics import compute_amax
from .tensor_scaling import CurrentScaling

#: an operand's role, and whether to take its columns instead of its rows
Side = tuple[str, bool]
#: the two operands of each product
PRODUCTS: dict[str, tuple[Side, Side]] = {
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}
#: sums of a product, in the order of `ProductTerms.error_sums`
SUMS = ("n", "error2", "first_error2", "second_error2", "output2")

_GOLDEN = (5**0.5 - 1) / 2
#: for rows and for columns: a prime p, and a multiplier near 0.618 p (the golden ratio). We sample every d steps. If a part
#: has at most p / 2 places, p samples reach all of them, unless p divides d. Rows and columns have different primes, so that
#: each row is sampled together with each column
_DIGITS = ((59, 36), (53, 33))


@dataclass(frozen=True)
class RowSample:
    """Some rows of a matrix, [k, c], each in two forms."""

    #: the rows in the matrix's dtype
    values: torch.Tensor
    #: the quantized values that a low-precision GEMM multiplies instead, float32
    quantized: torch.Tensor


@functools.lru_cache(1024)
def sample_indices(n: int, k: int, device: torch.device, step: int, columns: bool) -> torch.Tensor:
    """Return k of n places, int64, ascending and distinct: one in each of k equal parts, or all if n is at most k.

    Do not write to the result, which is cached.

    From part to part, the place within the part shifts by the golden ratio. So structures that repeat in a model (heads,
    sequences, batches) are not always sampled at the same point. From step to step, all places shift by the same amount, so
    that each position is sampled in turn. All ranks get the same places, without random numbers or host synchronization.

    Args:
        n: rows or columns of a result.
        step: step of the run.
        columns: whether the places are columns. The places of columns shift by other amounts than those of rows.
    """
    parts = min(n, k)
    part = torch.arange(parts, device=device)
    begin, end = part * n // parts, (part + 1) * n // parts
    return begin + (((part.double() * _GOLDEN + _phase(step, columns)) % 1) * (end - begin)).long()


def _phase(step: int, columns: bool) -> float:
    """Return the step's term of a scrambled van der Corput sequence, in [0, 1)."""
    prime, multiplier = _DIGITS[columns]
    phase, unit = 0.0, 1.0
    while step:
        step, digit = divmod(step, prime)
        unit /= prime
        phase += unit * (digit * multiplier % prime)
    return phase


def copy_quantized_rows(
    m: torch.Tensor, at: torch.Tensor, scale: torch.Tensor | BlockScalingRule, role: str, fmt: FloatFormat
) -> RowSample:
    """Return copies of some rows of a matrix, quantized as part of the whole matrix, without host synchronization.

    Args:
        m: [n, c], not empty, any floating dtype.
        at: indices of the rows, int64 [k].
        scale: float32 scalar, or the rule that chooses the scales of blocks.
        role: role of the operand; the block shape depends on it.
        fmt: format of the codes.
    """
    kept = m.index_select(0, at)
    if isinstance(scale, BlockScalingRule):
        return RowSample(kept, _in_blocks(m, kept, at, scale, role, fmt))
    codes = saturating_cast(kept.float() * scale, fmt)
    return RowSample(kept, (codes.double() / scale.double()).float())


def compute_current_scale(m: torch.Tensor, rule: CurrentScaling, fmt: FloatFormat) -> torch.Tensor:
    """Return the scale of a non-empty matrix, a float32 scalar. It is NaN if the matrix has NaN anywhere."""
    low, high = torch.aminmax(m)
    amax = torch.maximum(-low, high).float()
    return torch.where(amax.isnan(), amax, rule.compute_scale(amax, fmt.max))


def _in_blocks(
    m: torch.Tensor, kept: torch.Tensor, at: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat
) -> torch.Tensor:
    block = high, wide = rule.fit_block_shape(m, role)
    whole = compute_amax(m) if rule.two_level else torch.zeros((), device=m.device)
    # A block of one row is complete. The scale of a taller block also depends on rows that were not kept.
    scales = rule.compute_matrix_scales(kept if high == 1 else m, block, whole, fmt)
    if high > 1:
        scales = BlockScales(*(column.index_select(0, at // high) for column in scales))

    def of_each_value(per_block: torch.Tensor) -> torch.Tensor:
        return per_block.repeat_interleave(wide, 1)[:, : m.shape[1]]

    codes = saturating_cast(kept.float() * of_each_value(scales.scale), fmt)
    return (codes.double() * of_each_value(scales.scale_inv)).float()


@dataclass(frozen=True)
class ProductTerms:
    """A B^T computed from the operands' values, and the errors that their codes cause, float64 [k, l] each."""

    #: the product of the operands' values before any cast
    values: torch.Tensor
    #: error from quantizing A, error from quantizing B, and the joint error beyond their sum
    first: torch.Tensor
    second: torch.Tensor
    joint: torch.Tensor

    @classmethod
    def from_rows(cls, a: RowSample, b: RowSample) -> ProductTerms:
        """Compute the terms from rows of both operands, in float64, which neither TF32 nor autocast affects.

        Args:
            a: [k, c].
            b: [l, c].
        """
        high, wide = len(a.values), len(b.values)
        both = []
        for rows in (a, b):
            values = rows.values.double()
            both.append(torch.cat([values, rows.quantized.double() - values]))
        of = both[0] @ both[1].T
        return cls(of[:high, :wide], of[high:, :wide], of[:high, wide:], of[high:, wide:])

    @property
    def output_error(self) -> torch.Tensor:
        """The error Aq Bq^T - A B^T as a sum of terms. Subtracting the two products would lose small errors in rounding."""
        return self.first + self.second + self.joint

    def error_sums(self) -> torch.Tensor:
        """Return the effect of quantization on A B^T, float64 [5] in the order of `SUMS`.

        Sums of parts or of several products add up.

        n is the number of output values. `error2` is the sum of their squared errors. `first_error2` and `second_error2` are
        such sums with only A or only B quantized. `output2` is the sum of the squared exact values.
        """
        squares = [m.square().sum() for m in (self.output_error, self.first, self.second, self.values)]
        return torch.stack([torch.full_like(squares[0], self.values.numel()), *squares])

"""Block scaling: a scale for each small block of a tensor, instead of a single scale for the tensor.

We view an operand as a matrix [tokens, features] (W: [out, in]) and cut it into blocks from its first row and column. At the
edges blocks are smaller, which is equivalent to Transformer Engine's padding with zeros. Rules describe row-wise copies,
whose blocks run along the last dimension: X and W of the forward GEMM, dY of the GEMM for dX. The other GEMMs take
column-wise copies, which Transformer Engine quantizes from the same values in blocks of the transposed shape.
`BlockScalingRule.transpose_for_columnwise` makes these copies under the same rule. For W in square blocks, both copies are
the same.

As in Transformer Engine, the amax of a block ignores NaN, but not infinity. So an infinite value makes the scale of its
block useless.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import pad

from ..errors import ConfigError
from .formats import E2M1, FloatFormat, decode_e8m0, round_up_to_e8m0, saturating_cast
from .histogram import compute_bin_magnitudes
from .metrics import QuantizationSums, compute_value_sums, exceeds_format
from .tensor_scaling import compute_scale, compute_torchao_scale

#: number of rows and number of columns of a block
Block = tuple[int, int]
#: width of a block that is a whole row of the matrix
WHOLE_ROW = sys.maxsize
#: how many values are processed at once
CHUNK = 1 << 20
#: number of possible codes of a scale; the index after them is for blocks of zeros, which need no scale
CODES = 256
EMPTY = CODES
#: magnitudes of E2M1, ascending
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockScales(NamedTuple):
    """The scales of a matrix's blocks. Each tensor has one value for each block: [blocks of rows, blocks of columns]."""

    #: scales as stored next to the codes: float32 scale_inv (blockwise FP8), uint8 E8M0 codes (MXFP8), E4M3 scales (NVFP4)
    stored: torch.Tensor
    #: float32 factor that values are multiplied by before the cast
    scale: torch.Tensor
    #: float64 factor that turns a code into its value
    scale_inv: torch.Tensor


@dataclass(frozen=True)
class BlockScalingRule(ABC):
    """How to cut blocks and choose their scales."""

    #: values of `Recipe.fp8_format` that the rule supports, with the default first
    formats: ClassVar[tuple[str, ...]]
    #: whether the scales of blocks depend on the amax of the whole tensor
    two_level: ClassVar[bool] = False

    @property
    def rounds_stochastically(self) -> bool:
        """True if codes are rounded stochastically, so that metrics are expected values."""
        return False

    @property
    def has_value_dependent_scales(self) -> bool:
        """True if scales depend on more than the amax of a block and of the tensor."""
        return False

    def casts_columnwise(self, m: torch.Tensor) -> bool:
        """Return True if an engine casts a column-wise copy of this matrix."""
        return True

    def transpose_for_columnwise(self, m: torch.Tensor) -> torch.Tensor:
        """Return the transposed matrix that the column-wise copy is cast from. Its blocks run along the columns of `m`."""
        return m.t()

    @abstractmethod
    def get_block_shape(self, role: str) -> Block:
        """Return the size (rows, columns) of the blocks of operand `role`. A block of `WHOLE_ROW` columns is a whole row."""

    def fit_block_shape(self, x: torch.Tensor, role: str) -> Block:
        """Return the size (rows, columns) of the blocks of the matrix `x`. No block is wider than a row."""
        high, wide = self.get_block_shape(role)
        return high, min(wide, x.shape[1])

    @abstractmethod
    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales of blocks with the given amax.

        Args:
            amax: float32, of any shape.
            whole: float32 scalar, amax of the whole tensor. Only a two-level rule uses it.
            fmt: format of the codes.
            dtype: dtype of the tensor before the cast.
        """

    def compute_matrix_scales(
        self, x: torch.Tensor, block: Block, whole: torch.Tensor | None, fmt: FloatFormat
    ) -> BlockScales:
        """Return the scales of the blocks of a matrix.

        Args:
            x: [rows, columns], consecutive rows of a tensor that do not split any block.
            whole: float32 scalar, amax of the whole tensor, or None if `x` is the whole tensor.
            fmt: format of the codes.
        """
        amax = compute_block_amax(x, block)
        return self.compute_scales(amax, amax.amax() if whole is None else whole, fmt, x.dtype)

    def quantize(self, x: torch.Tensor, role: str, fmt: FloatFormat) -> BlockQuantized:
        """Return the codes and scales of `x`, a non-empty tensor [..., features] of any floating dtype."""
        rows = view_as_matrix(x)
        block = self.fit_block_shape(rows, role)
        scales = self.compute_matrix_scales(rows, block, None, fmt)
        codes = saturating_cast(pad_to_tiles(rows.float(), block) * _of_each_tile(scales.scale), fmt)
        return BlockQuantized(_untiled(codes, x), scales, block)


@dataclass(frozen=True)
class BlockQuantized:
    """A tensor as codes and scales."""

    #: the codes in the tensor's shape, in the dtype of the format
    codes: torch.Tensor
    scales: BlockScales
    block: Block

    def dequantize(self) -> torch.Tensor:
        """Return the values that the codes represent, float64 in the shape of the codes."""
        codes = pad_to_tiles(view_as_matrix(self.codes).double(), self.block)
        return _untiled(codes * _of_each_tile(self.scales.scale_inv), self.codes)


@dataclass(frozen=True)
class Float8BlockScaling(BlockScalingRule):
    """Transformer Engine's `Float8BlockScaling`. By default, blocks of X and dY are 1x128, and blocks of W are 128x128.

    Source: `transpose/quantize_transpose_{vector,square}_blockwise.cu` and `recipe/recipe_common.cuh`, since release 2.3.
    """

    #: round scales down to powers of two
    power_of_two: bool = True
    #: least amax to compute a scale from; replaces any smaller amax
    epsilon: float = 0.0
    #: 1 for blocks of 1x128 in each operand, 2 for 128x128, 0 for the default of each operand
    dimensions: int = 0

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")

    def __post_init__(self) -> None:
        if self.dimensions not in (0, 1, 2):
            raise ConfigError(f"dimensions of blockwise are {self.dimensions}; use 1 (1x128), 2 (128x128) or 0 (default)")

    def get_block_shape(self, role: str) -> Block:
        """Return 1x128, or 128x128 for W, unless `dimensions` sets the size."""
        square = self.dimensions == 2 or (self.dimensions == 0 and role == "weight")
        return (128, 128) if square else (1, 128)

    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales: the format's limit divided by amax, in float32. Metrics use their exact inverses."""
        scale = compute_scale(amax, fmt.max, self.epsilon, self.power_of_two, torch.finfo(dtype).max)
        return BlockScales(scale.reciprocal(), scale, 1 / scale.double())


@dataclass(frozen=True)
class MXFP8Scaling(BlockScalingRule):
    """Transformer Engine's `MXFP8BlockScaling`. Blocks are 1x32, and with `enable_2d_quantization` blocks of W are 32x32.

    scale_inv is a power of two in E8M0. It is rounded up, so that no value overflows. The OCP MX specification uses the
    exponent floor(log2(amax)) - floor(log2(limit)) instead, so scaled values above the limit saturate.
    Source: `cast/mxfp8/quantize_mxfp8.cuh`.
    """

    #: whether blocks of W are 32x32
    square_weights: bool = False
    #: whether `mxfp8_scales_by_logarithm` computes the scales, as in torchao without its kernels
    by_logarithm: bool = False

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")

    def get_block_shape(self, role: str) -> Block:
        """Return 1x32, or 32x32 for W with `square_weights`."""
        return (32, 32) if self.square_weights and role == "weight" else (1, 32)

    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales. Each scale_inv is the smallest power of two that is at least amax * (1 / limit) in float32."""
        if self.by_logarithm:
            return mxfp8_scales_by_logarithm(amax, fmt)
        reciprocal = torch.full((), fmt.max, dtype=torch.float32, device=amax.device).reciprocal()
        stored = round_up_to_e8m0(amax * reciprocal)
        scale_inv = decode_e8m0(stored)
        return BlockScales(stored, (1 / scale_inv).float(), scale_inv)


def mxfp8_scales_by_logarithm(amax: torch.Tensor, fmt: FloatFormat) -> BlockScales:
    """Return the scales of torchao's `_to_mx_rceil` in `prototype/mx_formats/mx_tensor.py`, in eager mode, release 0.18.

    The float32 logarithm is rounded, so an amax just above a power of two may get the scale for that power and saturate.
    torchao does not scale a block with code 0 before the cast, so its values are lost.
    """
    exponent = torch.ceil(torch.log2(amax / fmt.max)).clamp(-127, 127)
    stored = (exponent + 127).to(torch.uint8)
    scale = torch.where(stored == 0, 1.0, torch.exp2(127 - stored.float()))
    return BlockScales(stored, scale, decode_e8m0(stored))


@dataclass(frozen=True)
class RowwiseScaling(BlockScalingRule):
    """torchao's `ScalingGranularity.AXISWISE`: blocks of 1 x K. The default format is E4M3, also for dY.

    A row of X or dY is a token. A row of W is an output feature. In the GEMMs that use an operand by columns, each column
    has its own scale. A row with infinity is lost, because its scale is 0 and torchao divides by the scale.
    Source: `float8/float8_utils.py` and `float8/float8_training_tensor.py`, release 0.18.
    """

    #: round scales down to powers of two
    power_of_two: bool = True

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid", "e5m2")

    def get_block_shape(self, role: str) -> Block:
        """Return 1 x K."""
        return (1, WHOLE_ROW)

    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales: the format's limit divided by amax, computed in float64 and rounded to float32."""
        scale = compute_torchao_scale(amax, fmt.max, self.power_of_two)
        return BlockScales(scale, scale, torch.where(scale > 0, 1 / scale.double(), 0.0))


def compute_block_scales(
    rule: BlockScalingRule, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype, bins: slice = slice(None)
) -> BlockScales:
    """Return the scale for each possible amax, on the device of `whole`. A block's amax is a magnitude of its dtype.

    Args:
        whole: float32 scalar, amax of the whole tensor. Only a two-level rule uses it.
        fmt: format of the codes.
        dtype: dtype of the tensor before the cast, torch.bfloat16 or torch.float16.
        bins: which of the 32,768 magnitudes can be an amax. Only a two-level rule uses this argument.
    """
    if rule.two_level:
        return rule.compute_scales(compute_bin_magnitudes(dtype, whole.device)[bins], whole, fmt, dtype)
    return _one_level_scales(rule, fmt, dtype, whole.device)


@functools.lru_cache(maxsize=64)
def _one_level_scales(rule: BlockScalingRule, fmt: FloatFormat, dtype: torch.dtype, device: torch.device) -> BlockScales:
    amax = compute_bin_magnitudes(dtype, device)
    return rule.compute_scales(amax, amax[0], fmt, dtype)


def view_as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor [..., features] as [tokens, features]. Copy its values only if the strides require a copy."""
    return x.detach().reshape(x.shape[:-1].numel(), x.shape[-1] if x.dim() else 1)


def pad_to_tiles(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a matrix padded with zeros to whole blocks: [blocks of rows, rows, blocks of columns, columns]."""
    (rows, columns), (high, wide) = x.shape, block
    filled = pad(x, (0, -columns % wide, 0, -rows % high))
    return filled.view(math.ceil(rows / high), high, -1, wide)


def _of_each_tile(per_block: torch.Tensor) -> torch.Tensor:
    return per_block[:, None, :, None]


def _untiled(tiles: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the matrix that was cut into these tiles, in the shape of `like`."""
    rows, columns = view_as_matrix(like).shape
    return tiles.flatten(2).flatten(0, 1)[:rows, :columns].reshape(like.shape)


def compute_block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the largest magnitude of each block of a matrix, ignoring NaN: float32 [blocks of rows, blocks of columns]."""
    return pad_to_tiles(x.float(), block).abs().nan_to_num(0.0, torch.inf).amax((1, 3))


def block_quantization_sums(
    x: torch.Tensor, scales: BlockScales, block: Block, fmt: FloatFormat, by_chance: bool = False
) -> QuantizationSums:
    """Return the sums of a matrix's finite values under its block scales, as one row on the device of `x`.

    Args:
        by_chance: whether E2M1 codes are rounded stochastically. If so, the sums are expected values.
    """
    values = pad_to_tiles(x.float(), block)
    kept = torch.where(values.isfinite(), values, 0.0)  # zero adds nothing to any sum
    scaled = kept * _of_each_tile(scales.scale)
    if by_chance:
        return expected_sums(kept, scaled, _of_each_tile(scales.scale_inv), fmt)
    q = saturating_cast(scaled, fmt).double() * _of_each_tile(scales.scale_inv)
    return compute_value_sums(kept, exceeds_format(scaled, fmt), q, 1.0, lambda v: v.sum()[None])


def quantization_sums_in_blocks(
    x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, chunk: int = CHUNK
) -> QuantizationSums:
    """Return the sums of operand `role` under a block rule, as one row on the device of `x`, without host synchronization.

    Args:
        x: [..., features], any floating dtype.
        fmt: format of the codes.
        chunk: how many values are processed at once, in whole rows.
    """
    rows = view_as_matrix(x) if x.numel() else x.new_zeros(1, 1)
    block = rule.fit_block_shape(rows, role)
    height = max(1, chunk // rows.shape[1] // block[0]) * block[0]
    chunks = rows.split(height)
    whole = torch.zeros((), dtype=torch.float32, device=x.device)
    if rule.two_level:
        whole = torch.stack([compute_block_amax(c, block).amax() for c in chunks]).amax()
    chance = rule.rounds_stochastically
    parts = [
        block_quantization_sums(c, rule.compute_matrix_scales(c, block, whole, fmt), block, fmt, chance) for c in chunks
    ]
    return QuantizationSums.concat(parts).sum_rows()


def expected_sums(x: torch.Tensor, scaled: torch.Tensor, scale_inv: torch.Tensor, fmt: FloatFormat) -> QuantizationSums:
    """Return the expected values of the sums under stochastic rounding, as one row. Counts are rounded to integers.

    Take a value between two neighboring codes, at a fraction p of the way from the lower to the upper code. It is rounded up
    with probability p, so the mean of its codes is the value itself. Values beyond the range saturate.

    Args:
        x: finite values, float32.
        scaled: the same values multiplied by their scales, float32.
        scale_inv: float64 factor that turns a code into its value, of a shape that broadcasts with `x`.
        fmt: E2M1, the only format that Transformer Engine rounds stochastically.
    """
    if fmt != E2M1:
        raise ValueError(f"stochastic rounding is supported for E2M1, not for {fmt.name}")
    steps = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=x.device)
    size = scaled.abs().clamp_max(fmt.max)
    at = (torch.searchsorted(steps, size, right=True) - 1).clamp_max(len(steps) - 2)
    low, high = steps[at].double(), steps[at + 1].double()
    size = size.double()
    up, sign = (size - low) / (high - low), torch.sign(scaled).double()
    mean, variance = sign * size * scale_inv, (size - low) * (high - size) * scale_inv**2
    zero, lost = torch.where(low == 0, 1 - up, 0.0), scale_inv == 0
    of_zero = torch.where(lost.expand_as(zero), 1.0, zero)
    values = x.double()
    return QuantizationSums(
        underflows=(of_zero * (x != 0)).sum().round().long()[None],
        overflows=(exceeds_format(scaled, fmt) & ~lost).sum()[None],
        sum_error2=((values - mean).square() + variance).sum()[None],
        sum_xq=(values * mean).sum()[None],
        sum_q2=(mean.square() + variance).sum()[None],
    )


def count_block_scales(x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat) -> torch.Tensor:
    """Count how often each scale occurs among the blocks of an operand, without host synchronization.

    Args:
        x: [..., features], any floating dtype.
        fmt: format of the codes.

    Returns:
        Counts, int64 [257] on the device of `x`. The index is the stored code: the byte of an E8M0 or E4M3 scale, or the
        exponent byte of a float32 scale_inv. The last entry counts blocks of zeros.
    """
    rows = view_as_matrix(x) if x.numel() else x.new_zeros(0, 1)
    counts = torch.zeros(CODES + 1, dtype=torch.int64, device=x.device)
    if not rows.numel():
        return counts
    block = rule.fit_block_shape(rows, role)
    chunks = rows.split(max(1, CHUNK // rows.shape[1] // block[0]) * block[0])
    whole = torch.stack([compute_block_amax(c, block).amax() for c in chunks]).amax()
    for chunk in chunks:
        scales = rule.compute_matrix_scales(chunk, block, whole, fmt)
        codes = _codes(scales.stored, scales.scale_inv)
        empty = compute_block_amax(chunk, block) == 0
        found = torch.where(empty, EMPTY, codes.long()).flatten()
        counts += torch.zeros_like(counts).scatter_add_(0, found, torch.ones_like(found))
    return counts


def _codes(stored: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    if stored.element_size() == 1:
        return stored.view(torch.uint8)
    return scale_inv.float().abs().view(torch.int32) >> 23

"""Block scaling: a scale for each small block of a tensor instead of one for all of it.

An operand is seen as a matrix [tokens, features] (W: [out, in]) and cut into blocks from its first row and column; at the
edges blocks are smaller, which is what Transformer Engine's padding with zeros comes to. Rules are those of row-wise copies,
whose blocks run along the last dimension: X and W of the forward GEMM, dY of the GEMM that gives dX. The other GEMMs take
column-wise copies, which Transformer Engine quantizes from the same values in blocks of the transposed shape: these are
`BlockRule.columnwise` under the same rule; of a W in square blocks they are the same.

NaN counts for nothing in the amax of a block. Infinity does, as in Transformer Engine, and spoils the scale of its block.
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
from .histogram import magnitudes_of
from .metrics import QuantizationSums, exceeds_format, sums_of_values
from .tensor_scaling import compute_scale, torchao_scale

#: rows and columns of a block
Block = tuple[int, int]
#: columns of a block that is as wide as its matrix
WHOLE_ROW = sys.maxsize
#: values handled at once
CHUNK = 1 << 20
#: codes of scales, and behind them a place for blocks of zeros, which need none
CODES = 256
EMPTY = CODES
#: magnitudes of E2M1, ascending
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockScales(NamedTuple):
    """Scales of the blocks of a matrix, each [blocks of rows, blocks of columns]."""

    #: as kept beside the codes: float32 scale_inv of blockwise FP8, uint8 E8M0 codes of MXFP8, E4M3 of NVFP4
    stored: torch.Tensor
    #: float32, multiplies before the cast
    scale: torch.Tensor
    #: float64, multiplies a code to give what it stands for
    scale_inv: torch.Tensor


@dataclass(frozen=True)
class BlockRule(ABC):
    """How blocks are cut and their scales found."""

    #: values of `Recipe.fp8_format` that go with the rule, its default first
    formats: ClassVar[tuple[str, ...]]
    #: whether the scales of blocks depend on the amax of the whole tensor
    two_level: ClassVar[bool] = False

    @property
    def rounds_by_chance(self) -> bool:
        """Whether metrics are expected values."""
        return False

    @property
    def by_values(self) -> bool:
        """Whether scales depend on more than the amax of a block and that of the tensor."""
        return False

    def casts_columnwise(self, m: torch.Tensor) -> bool:
        """Whether an engine casts a column-wise copy of a matrix."""
        return True

    def columnwise(self, m: torch.Tensor) -> torch.Tensor:
        """What the column-wise copy of a matrix is cast from, transposed: its blocks run along the columns of `m`."""
        return m.t()

    @abstractmethod
    def block(self, role: str) -> Block:
        """Rows and columns of a block of operand `role`; `WHOLE_ROW` columns: as many as there are."""

    def block_in(self, x: torch.Tensor, role: str) -> Block:
        """The same in a matrix, in which no block is wider than a row."""
        high, wide = self.block(role)
        return high, min(wide, x.shape[1])

    @abstractmethod
    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Scales of blocks of the given amax.

        Args:
            amax: float32, of any shape.
            whole: float32 scalar, amax of the whole tensor; only a two-level rule looks at it.
            fmt: format of the codes.
            dtype: of the tensor before the cast.
        """

    def scales_in(self, x: torch.Tensor, block: Block, whole: torch.Tensor | None, fmt: FloatFormat) -> BlockScales:
        """Scales of the blocks of a matrix.

        Args:
            x: [rows, columns], whole blocks of rows of a tensor.
            whole: float32 scalar, amax of the whole tensor; None: `x` is it.
            fmt: format of the codes.
        """
        amax = block_amax(x, block)
        return self.scales(amax, amax.amax() if whole is None else whole, fmt, x.dtype)

    def quantize(self, x: torch.Tensor, role: str, fmt: FloatFormat) -> BlockQuantized:
        """Codes and scales of `x`: [..., features], not empty, any floating dtype."""
        rows = view_as_matrix(x)
        block = self.block_in(rows, role)
        scales = self.scales_in(rows, block, None, fmt)
        codes = saturating_cast(pad_to_tiles(rows.float(), block) * _of_each_tile(scales.scale), fmt)
        return BlockQuantized(_untiled(codes, x), scales, block)


@dataclass(frozen=True)
class BlockQuantized:
    """A tensor in codes and scales."""

    #: of the tensor's shape, in the dtype of the format
    codes: torch.Tensor
    scales: BlockScales
    block: Block

    def dequantize(self) -> torch.Tensor:
        """What the codes stand for, float64 of their shape."""
        codes = pad_to_tiles(view_as_matrix(self.codes).double(), self.block)
        return _untiled(codes * _of_each_tile(self.scales.scale_inv), self.codes)


@dataclass(frozen=True)
class Float8BlockScaling(BlockRule):
    """Transformer Engine's `Float8BlockScaling`: 1x128 for X and dY, 128x128 for W by default.

    Source: `transpose/quantize_transpose_{vector,square}_blockwise.cu` and `recipe/recipe_common.cuh`, release 2.3 on.
    """

    #: round scales down to powers of two
    power_of_two: bool = True
    #: amax below this counts as this
    epsilon: float = 0.0
    #: 1: blocks are 1x128 whatever the operand; 2: 128x128; 0: as by default
    dimensions: int = 0

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")

    def __post_init__(self) -> None:
        if self.dimensions not in (0, 1, 2):
            raise ConfigError(f"dimensions of blockwise are {self.dimensions}; use 1 (1x128), 2 (128x128) or 0 (as usual)")

    def block(self, role: str) -> Block:
        """1x128; 128x128 for W."""
        square = self.dimensions == 2 or (self.dimensions == 0 and role == "weight")
        return (128, 128) if square else (1, 128)

    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Format limit / amax, in float32. Metrics take the exact inverse, as they do of per-tensor scales."""
        scale = compute_scale(amax, fmt.max, self.epsilon, self.power_of_two, torch.finfo(dtype).max)
        return BlockScales(scale.reciprocal(), scale, 1 / scale.double())


@dataclass(frozen=True)
class MXFP8Scaling(BlockRule):
    """Transformer Engine's `MXFP8BlockScaling`: 1x32, scales are powers of two in E8M0, rounded up: nothing overflows.

    With `enable_2d_quantization` blocks of W are 32x32.

    OCP MX itself has floor(log2(amax)) - floor(log2(limit)), under which what lies above limit saturates.
    Source: `cast/mxfp8/quantize_mxfp8.cuh`.
    """

    #: blocks of W are 32x32
    square_weights: bool = False
    #: find exponents as torchao does without its kernels, by `mxfp8_scales_by_logarithm`
    by_logarithm: bool = False

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")

    def block(self, role: str) -> Block:
        """1x32, or 32x32."""
        return (32, 32) if self.square_weights and role == "weight" else (1, 32)

    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """scale_inv is the power of two at or above amax / limit; the quotient a float32 product with 1 / limit."""
        if self.by_logarithm:
            return mxfp8_scales_by_logarithm(amax, fmt)
        reciprocal = torch.full((), fmt.max, dtype=torch.float32, device=amax.device).reciprocal()
        stored = round_up_to_e8m0(amax * reciprocal)
        scale_inv = decode_e8m0(stored)
        return BlockScales(stored, (1 / scale_inv).float(), scale_inv)


def mxfp8_scales_by_logarithm(amax: torch.Tensor, fmt: FloatFormat) -> BlockScales:
    """As `_to_mx_rceil` of torchao's `prototype/mx_formats/mx_tensor.py` in eager mode, release 0.18.

    The float32 logarithm rounds: an amax just above a power of two may get that one and saturate. A block whose code is
    0 is not scaled before the cast, and lost.
    """
    exponent = torch.ceil(torch.log2(amax / fmt.max)).clamp(-127, 127)
    stored = (exponent + 127).to(torch.uint8)
    scale = torch.where(stored == 0, 1.0, torch.exp2(127 - stored.float()))
    return BlockScales(stored, scale, decode_e8m0(stored))


@dataclass(frozen=True)
class RowwiseScaling(BlockRule):
    """torchao's `ScalingGranularity.AXISWISE`: blocks of 1 x K. E4M3, unless asked otherwise, for dY too.

    A row of X and dY is a token, a row of W an output feature. In the GEMMs that take an operand by columns, a column has a
    scale of its own. A row that holds infinity is lost: its scale is 0, and torchao divides by that.
    Source: `float8/float8_utils.py` and `float8/float8_training_tensor.py`, release 0.18.
    """

    #: round scales down to powers of two
    power_of_two: bool = True

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid", "e5m2")

    def block(self, role: str) -> Block:
        """1 x K."""
        return (1, WHOLE_ROW)

    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Format limit / amax, in float64, rounded to float32."""
        scale = torchao_scale(amax, fmt.max, self.power_of_two)
        return BlockScales(scale, scale, torch.where(scale > 0, 1 / scale.double(), 0.0))


def compute_block_scales(
    rule: BlockRule, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype, bins: slice = slice(None)
) -> BlockScales:
    """Return the scales that each amax leads to, on the device of `whole`: a block's amax is a magnitude of its dtype.

    Args:
        whole: float32 scalar, amax of the whole tensor; only a two-level rule looks at it.
        fmt: format of the codes.
        dtype: of the tensor before the cast, torch.bfloat16 or torch.float16.
        bins: which of the 32,768 magnitudes can be an amax.
    """
    if rule.two_level:
        return rule.scales(magnitudes_of(dtype, whole.device)[bins], whole, fmt, dtype)
    return _one_level_scales(rule, fmt, dtype, whole.device)


@functools.lru_cache(maxsize=64)
def _one_level_scales(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype, device: torch.device) -> BlockScales:
    amax = magnitudes_of(dtype, device)
    return rule.scales(amax, amax[0], fmt, dtype)


def view_as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., features] as [tokens, features]; a copy only where strides demand one."""
    return x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)


def pad_to_tiles(x: torch.Tensor, block: Block) -> torch.Tensor:
    """A matrix filled up with zeros to whole blocks: [blocks of rows, rows, blocks of columns, columns]."""
    (rows, columns), (high, wide) = x.shape, block
    filled = pad(x, (0, -columns % wide, 0, -rows % high))
    return filled.view(math.ceil(rows / high), high, -1, wide)


def _of_each_tile(per_block: torch.Tensor) -> torch.Tensor:
    return per_block[:, None, :, None]


def _untiled(tiles: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Tiles of the matrix form of `like`, laid out as `like`."""
    rows, columns = view_as_matrix(like).shape
    return tiles.flatten(2).flatten(0, 1)[:rows, :columns].reshape(like.shape)


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Largest magnitude in each block of a matrix, NaN ignored: float32 [blocks of rows, blocks of columns]."""
    return pad_to_tiles(x.float(), block).abs().nan_to_num(0.0, torch.inf).amax((1, 3))


def block_sums(
    x: torch.Tensor, scales: BlockScales, block: Block, fmt: FloatFormat, by_chance: bool = False
) -> QuantizationSums:
    """Sums (one row, on x's device) of a matrix under the scales of its blocks, over its finite values.

    Args:
        by_chance: whether E2M1 codes are rounded up or down by chance: then what is expected of the sums.
    """
    values = pad_to_tiles(x.float(), block)
    kept = torch.where(values.isfinite(), values, 0.0)  # a zero adds nothing to any sum
    scaled = kept * _of_each_tile(scales.scale)
    if by_chance:
        return expected_sums(kept, scaled, _of_each_tile(scales.scale_inv), fmt)
    q = saturating_cast(scaled, fmt).double() * _of_each_tile(scales.scale_inv)
    return sums_of_values(kept, exceeds_format(scaled, fmt), q, 1.0, lambda v: v.sum()[None])


def quantization_sums_in_blocks(
    x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat, chunk: int = CHUNK
) -> QuantizationSums:
    """Sums (one row, on x's device) of operand `role` under a block rule, in chunks of rows; no host synchronization.

    Args:
        x: [..., features], any floating dtype.
        fmt: format of the codes.
        chunk: values handled at once.
    """
    rows = view_as_matrix(x) if x.numel() else x.new_zeros(1, 1)
    block = rule.block_in(rows, role)
    height = max(1, chunk // rows.shape[1] // block[0]) * block[0]
    chunks = rows.split(height)
    whole = torch.zeros((), dtype=torch.float32, device=x.device)
    if rule.two_level:
        whole = torch.stack([block_amax(c, block).amax() for c in chunks]).amax()
    chance = rule.rounds_by_chance
    parts = [block_sums(c, rule.scales_in(c, block, whole, fmt), block, fmt, chance) for c in chunks]
    return QuantizationSums.concat(parts).total()


def expected_sums(x: torch.Tensor, scaled: torch.Tensor, scale_inv: torch.Tensor, fmt: FloatFormat) -> QuantizationSums:
    """The expected values of the sums (one row), counts rounded; their spread is not told.

    A value at a share p of the way from one neighbor to the next is rounded up with probability p, so that its mean is
    itself. What lies beyond the range saturates.

    Args:
        x: finite values, float32.
        scaled: the same as they are cast, float32.
        scale_inv: float64, multiplies a code to give what it stands for; of a shape that goes with x.
        fmt: E2M1, the one format that Transformer Engine rounds so.
    """
    if fmt != E2M1:
        raise ValueError(f"stochastic rounding is known of E2M1, not of {fmt.name}")
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


def count_block_scales(x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat) -> torch.Tensor:
    """How often each scale occurs among the blocks of an operand; no host synchronization.

    Args:
        x: [..., features], any floating dtype.
        fmt: format of the codes.

    Returns:
        int64 [257] on x's device, by what is kept beside the codes: the byte of an E8M0 or E4M3 scale, the exponent's byte
        of a float32 one, which is scale_inv. The last place counts blocks of zeros.
    """
    rows = view_as_matrix(x) if x.numel() else x.new_zeros(0, 1)
    counts = torch.zeros(CODES + 1, dtype=torch.int64, device=x.device)
    if not rows.numel():
        return counts
    block = rule.block_in(rows, role)
    chunks = rows.split(max(1, CHUNK // rows.shape[1] // block[0]) * block[0])
    whole = torch.stack([block_amax(c, block).amax() for c in chunks]).amax()
    for chunk in chunks:
        scales = rule.scales_in(chunk, block, whole, fmt)
        codes = _codes(scales.stored, scales.scale_inv)
        empty = block_amax(chunk, block) == 0
        found = torch.where(empty, EMPTY, codes.long()).flatten()
        counts += torch.zeros_like(counts).scatter_add_(0, found, torch.ones_like(found))
    return counts


def _codes(stored: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    if stored.element_size() == 1:
        return stored.view(torch.uint8)
    return scale_inv.float().abs().view(torch.int32) >> 23

"""NVFP4: E2M1 codes under two levels of scales, and Transformer Engine's transform of values before the cast."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigError
from .block_scaling import Block, BlockScales, BlockScalingRule, compute_block_amax, pad_to_tiles
from .formats import E2M1, E4M3, FloatFormat, decode_codes, saturating_cast
from .tensor_scaling import FLT_MAX

#: number of values that are transformed together, and the signs of Transformer Engine's transform
_HADAMARD = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
#: the signs as bits of a number; the first sign is the lowest bit
SIGN_MASK = sum((sign < 0) << i for i, sign in enumerate(_SIGNS))


@dataclass(frozen=True)
class NVFP4Scaling(BlockScalingRule):
    """Transformer Engine's `NVFP4BlockScaling`. Blocks have E4M3 scales, and the tensor has a float32 scale.

    Blocks are 1x16, or 16x16 for W. Codes are rounded to nearest. Under stochastic rounding, metrics are expected values. We
    use this rank's amax of the tensor, although Transformer Engine may reduce the amax over ranks.
    Source: `cast/nvfp4/core_nvfp4.cuh`, `quantize_transpose_nvfp4.cuh` and `custom_recipes/reference_nvfp4.py`.
    """

    #: whether blocks of W are 16x16; with `disable_2d_quantization` they are 1x16
    square_weights: bool = True
    #: whether codes are rounded stochastically; if so, metrics are expected values, but `quantize` still rounds to nearest
    stochastic: bool = False
    #: transform of column-wise copies before the cast: "" for no transform, "plain" for the Hadamard matrix without signs,
    #: "signs" for the matrix with Transformer Engine's signs
    hadamard: str = ""
    #: whether each row, and not the tensor, has a second-level scale, as in X with `row_scaled_activation`
    row_scaled: bool = False
    #: "MAE" or "MSE": a block's largest value becomes 6 or 4, whichever has the smaller error of this kind; "": always 6
    four_over_six: str = ""
    #: value of the largest block scale; 256 with `nvfp4_4over6_e4m3_use_256`
    largest_scale: int = 448

    formats: ClassVar[tuple[str, ...]] = (E2M1.name,)
    two_level: ClassVar[bool] = True

    def get_block_shape(self, role: str) -> Block:
        """Return 1x16, or 16x16 for W."""
        return (16, 16) if self.square_weights and role == "weight" else (1, 16)

    def __post_init__(self) -> None:
        if self.hadamard not in ("", "plain", "signs"):
            raise ConfigError(f"hadamard of nvfp4 is {self.hadamard!r}; use 'plain', 'signs' or '' (no transform)")
        if self.four_over_six not in ("", "MAE", "MSE"):
            raise ConfigError(f"four_over_six of nvfp4 is {self.four_over_six!r}; use 'MAE', 'MSE' or '' (off)")
        if self.largest_scale not in ((448, 256) if self.four_over_six else (448,)):
            raise ConfigError(f"largest_scale of nvfp4 is {self.largest_scale}; use 448, or 256 with four_over_six")
        if self.stochastic and self.has_value_dependent_scales:
            raise ConfigError("nvfp4 does not support stochastic together with four_over_six or row_scaled")

    @property
    def rounds_stochastically(self) -> bool:
        """True if codes are rounded stochastically, so that metrics are expected values."""
        return self.stochastic

    @property
    def has_value_dependent_scales(self) -> bool:
        """True if scales depend on more than the amax of a block and of the tensor."""
        return self.row_scaled or bool(self.four_over_six)

    def casts_columnwise(self, m: torch.Tensor) -> bool:
        """Return True if there is no transform, or if the number of rows is a multiple of 16 as the transform needs."""
        return not self.hadamard or m.shape[0] % _HADAMARD == 0

    def transpose_for_columnwise(self, m: torch.Tensor) -> torch.Tensor:
        """Return the transposed matrix. If there is a transform, apply it to groups of 16 values of a row, and round.

        Raises:
            ValueError: the number of rows of `m` is not a multiple of 16.
        """
        if not self.hadamard:
            return super().transpose_for_columnwise(m)
        if m.shape[0] % _HADAMARD:
            raise ValueError(f"{m.shape[0]} rows are not a multiple of {_HADAMARD}, which the Hadamard transform needs")
        groups = m.t().reshape(-1, _HADAMARD).float()
        return (groups @ hadamard_matrix(self.hadamard == "signs", m.device)).to(m.dtype).view(m.shape[1], m.shape[0])

    def tensor_scale(self, whole: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
        """Return the second-level scale, float32 scalar, which maps the largest block scale to E4M3's limit."""
        limit = torch.full((), self.largest_scale * fmt.max, dtype=torch.float32, device=whole.device)
        scale = (limit / whole).clamp_max(FLT_MAX)
        return torch.where((whole > 0) & (scale > 0), scale, 1.0)

    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales. If a block's stored scale rounds to zero, its codes saturate but represent zero."""
        encode = self.tensor_scale(whole, fmt)
        reciprocal = torch.full((), fmt.max, dtype=torch.float32, device=amax.device).reciprocal()
        stored = saturating_cast(amax * (encode * reciprocal), E4M3)
        scale = (stored.float() * encode.reciprocal()).reciprocal().clamp_max(FLT_MAX)
        return BlockScales(stored, scale, stored.double() / encode.double())

    def compute_matrix_scales(
        self, x: torch.Tensor, block: Block, whole: torch.Tensor | None, fmt: FloatFormat
    ) -> BlockScales:
        """Return the scales as `BlockScalingRule.compute_matrix_scales` does.

        With `four_over_six`, a block's scale depends on its values.
        """
        if not self.has_value_dependent_scales:
            return super().compute_matrix_scales(x, block, whole, fmt)
        amax = compute_block_amax(x, block)
        largest = amax.amax() if whole is None else whole
        if self.row_scaled:
            largest = amax.amax(1, keepdim=True).repeat_interleave(block[0], 0)[: len(amax)]
        if not self.four_over_six:
            return self.compute_scales(amax, largest, fmt, x.dtype)
        return four_over_six(x, block, amax, largest, self.tensor_scale(largest, fmt), self, fmt)


def four_over_six(
    x: torch.Tensor,
    block: Block,
    amax: torch.Tensor,
    largest: torch.Tensor,
    encode: torch.Tensor,
    rule: NVFP4Scaling,
    fmt: FloatFormat,
) -> BlockScales:
    """Return the better of two scales for each block, computed step by step in float32 as in Transformer Engine.

    Args:
        x: [rows, columns].
        amax: amax of each block of `x`, float32 [blocks of rows, blocks of columns].
        largest: float32, amax of the tensor (a scalar) or of each row ([rows, 1]).
        encode: second-level scale, in the shape of `largest`.
        rule: defines the error, and the value of the largest scale.
        fmt: format of the codes.

    Source: `_quantize_blockwise_4over6_reference` of `custom_recipes/reference_nvfp4.py`, release 2.20.
    """
    base, values = amax / fmt.max * encode, pad_to_tiles(x.float(), block)
    at_six, at_four = (saturating_cast(base * stretch, E4M3) for stretch in (1.0, 1.5))
    found = []
    for stored in (at_six, at_four):
        scale = (stored.float() * encode.reciprocal()).reciprocal().clamp_max(FLT_MAX)
        codes = decode_codes(saturating_cast(values * scale[:, None, :, None], fmt), fmt)
        stands_for = codes * stored.float()[:, None, :, None] * _of_rows(largest) / (fmt.max * rule.largest_scale)
        found.append((stored, scale, _error(stands_for - values, rule.four_over_six == "MSE")))
    (six, scale_six, error_six), (four, scale_four, error_four) = found
    better = error_four < error_six
    stored = torch.where(better, four.float(), six.float())
    scale = torch.where(better, scale_four, scale_six)
    return BlockScales(stored.to(six.dtype), scale, stored.double() / encode.double())


def _of_rows(largest: torch.Tensor) -> torch.Tensor:
    return largest[:, :, None, None] if largest.dim() else largest


def _error(difference: torch.Tensor, squared: bool) -> torch.Tensor:
    """Return the error of each block. Add up in Transformer Engine's order: along each row, then pairs of rows.

    Args:
        difference: float32 [blocks of rows, rows, blocks of columns, columns].
    """
    each = difference * difference if squared else difference.abs()
    total = each[..., 0]
    for column in range(1, each.shape[-1]):
        total = total + each[..., column]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


@functools.lru_cache(maxsize=8)
def hadamard_matrix(signs: bool, device: torch.device) -> torch.Tensor:
    """Return the orthogonal matrix that transforms groups of 16 values: float32 [16, 16], symmetric except for signs.

    Args:
        signs: whether rows have the signs of Transformer Engine's transform.
    """
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    flipped = matrix * torch.tensor(_SIGNS)[:, None] if signs else matrix
    return (flipped / 4).to(device)


@dataclass(frozen=True)
class TorchaoNVFP4Scaling(NVFP4Scaling):
    """Scales of torchao's `NVFP4Linear`, for the same blocks, but at least E4M3's smallest normal value.

    So a block of small values may underflow, although Transformer Engine would choose a smaller scale for it. torchao's
    Triton kernel may round the last place of a quotient differently from IEEE 754.
    Source: `prototype/moe_training/nvfp4_training/hadamard_utils.py` and `quantize_2d_triton.py`, release 0.18.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic or self.hadamard or self.has_value_dependent_scales or self.largest_scale != E4M3.max:
            raise ConfigError("nvfp4_torchao supports only the option square_weights; other options need Transformer Engine")

    def compute_scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Return the scales, computed step by step in float32 as in `_nvfp4_quantize`.

        GEMMs use amax / 2688 as the tensor's scale.
        """
        encode = self.tensor_scale(whole, fmt)
        stored = saturating_cast((amax / fmt.max * encode).clamp(E4M3.min_normal, E4M3.max), E4M3)
        scale = (stored.float() * encode.reciprocal()).reciprocal().clamp_max(FLT_MAX)
        return BlockScales(stored, scale, stored.double() * (whole / (E4M3.max * fmt.max)).double())

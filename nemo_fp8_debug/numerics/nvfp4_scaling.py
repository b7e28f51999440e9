"""NVFP4: E2M1 codes under two levels of scales, and what Transformer Engine does to values before the cast."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigError
from .block_scaling import Block, BlockRule, BlockScales
from .formats import E2M1, E4M3, FloatFormat, saturating_cast
from .scale_from_amax import FLT_MAX

#: values that are transformed together, and the signs of Transformer Engine's transform
_HADAMARD = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
#: the same as bits, the first one the lowest
SIGN_MASK = sum((sign < 0) << i for i, sign in enumerate(_SIGNS))


@dataclass(frozen=True)
class NVFP4Scaling(BlockRule):
    """Transformer Engine's `NVFP4BlockScaling`: 1x16, 16x16 for W; E4M3 scales of blocks, under a float32 one of the tensor.

    Codes are rounded to nearest, and their metrics under stochastic rounding are expected values. The tensor's amax is this
    rank's, where Transformer Engine may reduce it over ranks.
    Source: `cast/nvfp4/core_nvfp4.cuh`, `quantize_transpose_nvfp4.cuh` and `custom_recipes/reference_nvfp4.py`.
    """

    #: blocks of W are 16x16; 1x16 with `disable_2d_quantization`
    square_weights: bool = True
    #: codes are rounded up or down by chance, and metrics are what is expected of them; codes made here are the nearest
    stochastic: bool = False
    #: what is transformed before the cast: "" nothing; by the Hadamard matrix alone ("plain"), or with the signs that
    #: Transformer Engine has ("signs"), the column-wise copies
    hadamard: str = ""

    formats: ClassVar[tuple[str, ...]] = (E2M1.name,)
    two_level: ClassVar[bool] = True

    def block(self, role: str) -> Block:
        """1x16; 16x16 for W."""
        return (16, 16) if self.square_weights and role == "weight" else (1, 16)

    def __post_init__(self) -> None:
        if self.hadamard not in ("", "plain", "signs"):
            raise ConfigError(f"hadamard of nvfp4 is {self.hadamard!r}; use 'plain', 'signs' or '' (no transform)")

    @property
    def rounds_by_chance(self) -> bool:
        """Whether metrics are expected values."""
        return self.stochastic

    def columnwise(self, m: torch.Tensor) -> torch.Tensor:
        """Transformed in groups of 16 of a row, and rounded to the dtype.

        Raises:
            ValueError: rows are not of whole groups.
        """
        if not self.hadamard:
            return super().columnwise(m)
        if m.shape[0] % _HADAMARD:
            raise ValueError(f"its {m.shape[0]} rows are not a multiple of {_HADAMARD}, which the Hadamard transform takes")
        groups = m.t().reshape(-1, _HADAMARD).float()
        return (groups @ hadamard_matrix(self.hadamard == "signs", m.device)).to(m.dtype).view(m.shape[1], m.shape[0])

    def tensor_scale(self, whole: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
        """The second level, float32 scalar: brings the largest scale of a block to E4M3's limit."""
        limit = torch.full((), E4M3.max * fmt.max, dtype=torch.float32, device=whole.device)
        scale = (limit / whole).clamp_max(FLT_MAX)
        return torch.where((whole > 0) & (scale > 0), scale, 1.0)

    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """A block whose scale rounds to zero is lost: its codes saturate and stand for zero."""
        encode = self.tensor_scale(whole, fmt)
        reciprocal = torch.full((), fmt.max, dtype=torch.float32, device=amax.device).reciprocal()
        stored = saturating_cast(amax * (encode * reciprocal), E4M3)
        scale = (stored.float() * encode.reciprocal()).reciprocal().clamp_max(FLT_MAX)
        return BlockScales(stored, scale, stored.double() / encode.double())


@functools.lru_cache(maxsize=8)
def hadamard_matrix(signs: bool, device: torch.device) -> torch.Tensor:
    """Orthogonal and symmetric but for signs, float32 [16, 16]; a group of 16 values times it is what is cast.

    Args:
        signs: whether rows have the signs of Transformer Engine's transform.
    """
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    flipped = matrix * torch.tensor(_SIGNS)[:, None] if signs else matrix
    return (flipped / 4).to(device)

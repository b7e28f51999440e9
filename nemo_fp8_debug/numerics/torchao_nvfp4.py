"""NVFP4 as torchao's training kernels find its scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .block_scaling import BlockScales
from .formats import E4M3, FloatFormat, saturating_cast
from .nvfp4_scaling import NVFP4Scaling
from .scale_from_amax import FLT_MAX


@dataclass(frozen=True)
class TorchaoNVFP4Scaling(NVFP4Scaling):
    """Scales of torchao's `NVFP4Linear`: 1x16, 16x16 for W, as Transformer Engine's, but never below E4M3's least normal.

    So a block of small values underflows, where Transformer Engine's keeps a scale for it. A Triton kernel may round a
    quotient otherwise than IEEE 754 does, in its last place.
    Source: `prototype/moe_training/nvfp4_training/hadamard_utils.py` and `quantize_2d_triton.py`, release 0.18.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic or self.hadamard or self.by_values or self.largest_scale != E4M3.max:
            raise ConfigError("nvfp4_torchao has the option square_weights only; the others are Transformer Engine's")

    def scales(self, amax: torch.Tensor, whole: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype) -> BlockScales:
        """Step by step in float32, as `_nvfp4_quantize`; GEMMs take amax / 2688 as the scale of the tensor."""
        encode = self.tensor_scale(whole, fmt)
        stored = saturating_cast((amax / fmt.max * encode).clamp(E4M3.min_normal, E4M3.max), E4M3)
        scale = (stored.float() * encode.reciprocal()).reciprocal().clamp_max(FLT_MAX)
        return BlockScales(stored, scale, stored.double() * (whole / (E4M3.max * fmt.max)).double())

"""Rowwise scaling: a scale for each row of a GEMM's operand, along the dimension that the GEMM sums over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .block_scaling import WHOLE_ROW, Block, BlockRule, BlockScales
from .formats import FloatFormat
from .scale_from_amax import torchao_scale


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

"""The hot loops, on each kind of device: counting the bit patterns of a tensor into a sketch, and sums of values."""

from __future__ import annotations

import numpy as np
import torch

from ..numerics.blocks import BlockRule, quantization_sums_in_blocks
from ..numerics.figures import QuantizationSums, quantization_sums_of_float32
from ..numerics.formats import FloatFormat
from ..numerics.scaling import CurrentScaling, Unscaled, amax_of
from ..numerics.sketch import BINS, DTYPES, Sketch
from . import anywhere, cpu, cpu_blocks
from .memory import bits_of


def sketch(x: torch.Tensor) -> Sketch:
    """Count the magnitudes of `x`, in one read of it where it is bfloat16 or float16.

    Args:
        x: any shape and strides; bfloat16, float16, or another floating dtype, which is rounded to bfloat16 and marked.
    """
    rounded = x.dtype not in DTYPES
    dtype = torch.bfloat16 if rounded else x.dtype
    # On a CPU numpy's zeros: memory that the system hands out zeroed, and most bins are never touched.
    on_cpu = x.device.type == "cpu"
    counts = torch.from_numpy(np.zeros(BINS, np.int64)) if on_cpu else torch.zeros(BINS, dtype=torch.int64, device=x.device)
    result = Sketch(dtype, counts, rounded)
    count_into(result, x)
    return result


def count_into(sketch: Sketch, x: torch.Tensor) -> None:
    """Add the magnitudes of `x` to a sketch of its dtype."""
    values = _flat(x.detach().to(sketch.dtype))
    if x.device.type == "cpu":
        cpu.count_patterns(bits_of(values), sketch.counts.numpy(), torch.get_num_threads())
    else:
        anywhere.count_patterns(values.view(torch.int16), sketch.counts)


def quantization_sums(
    x: torch.Tensor, scale: torch.Tensor | CurrentScaling | Unscaled | BlockRule, role: str, fmt: FloatFormat
) -> QuantizationSums:
    """Sums (one row, on x's device) of an operand, straight from its values; no host synchronisation.

    Args:
        x: [..., features], any floating dtype.
        scale: float32 scalar, or the rule that finds scales.
        role: of the operand, which blocks depend on.
        fmt: format of the codes.
    """
    if isinstance(scale, BlockRule):
        on_cpu = x.device.type == "cpu"
        by = (cpu_blocks.block_amax, cpu_blocks.block_sums, cpu_blocks.CHUNK) if on_cpu else ()
        return quantization_sums_in_blocks(x, scale, role, fmt, *by)
    if isinstance(scale, Unscaled):
        scale = torch.ones(())
    if isinstance(scale, CurrentScaling):
        scale = scale.scale(amax_of(x), fmt.max)
    return quantization_sums_of_float32(x.float(), scale.to(x.device), fmt)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in any order, [n] contiguous; a view where `x` fills its memory, whatever the order of its axes."""
    by_stride = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    return x.permute(by_stride).reshape(-1)

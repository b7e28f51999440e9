"""The hot loops: counting the bit patterns of a tensor into a sketch, on each kind of device."""

from __future__ import annotations

import numpy as np
import torch

from ..numerics.sketch import DTYPES, Sketch
from . import anywhere, cpu


def sketch(x: torch.Tensor) -> Sketch:
    """Count the magnitudes of `x`, in one read of it where it is bfloat16 or float16.

    Args:
        x: any shape and strides; bfloat16, float16, or another floating dtype, which is rounded to bfloat16 and marked.
    """
    x = x.detach()
    rounded = x.dtype not in DTYPES
    if rounded:
        x = x.to(torch.bfloat16)
    counts = torch.zeros(32768, dtype=torch.int64, device=x.device)
    values = _flat(x).view(torch.int16)
    if x.device.type == "cpu":
        cpu.count_patterns(values.numpy().view(np.uint16), counts.numpy(), torch.get_num_threads())
    else:
        anywhere.count_patterns(values, counts)
    return Sketch(x.dtype, counts, rounded)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in any order, [n] contiguous; a view where `x` fills its memory, whatever the order of its axes."""
    by_stride = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    return x.permute(by_stride).reshape(-1)

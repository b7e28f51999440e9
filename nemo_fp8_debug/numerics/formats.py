"""Number formats as data, and the one saturating cast that every figure and every emulation uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format and the torch dtype that holds it."""

    name: str
    #: torch dtype whose cast rounds to nearest, ties to even
    dtype: torch.dtype
    #: largest finite magnitude; a saturating cast clamps to it
    max: float
    #: smallest normal magnitude
    min_normal: float
    #: smallest non-zero magnitude; half of it and below rounds to zero
    min_subnormal: float

    @property
    def bits(self) -> int:
        """Width of one value in bits."""
        return self.dtype.itemsize * 8


#: OCP FP8 E4M3 (no infinity, one NaN code per sign): OCP 8-bit Floating Point Specification 1.0, table 1
E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9)
#: OCP FP8 E5M2 (IEEE-like, with infinities)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16)
BF16 = FloatFormat("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**-126, 2.0**-133)
FP16 = FloatFormat("fp16", torch.float16, 65504.0, 2.0**-14, 2.0**-24)

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, BF16, FP16)}


def saturating_cast(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round `x` to `fmt`: nearest, ties to even, overflow and infinities to the largest finite value, NaN kept.

    The rule of NVIDIA's conversion with `__NV_SATFINITE`, which Transformer Engine uses. The clamp comes first because
    torch's own casts disagree between versions on what lies beyond the range (NaN, infinity or saturation).

    Args:
        x: any shape, float32.

    Returns:
        A tensor of the same shape in `fmt.dtype`.
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)

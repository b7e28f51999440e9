"""Numpy transcriptions of Transformer Engine's block scaling kernels, the recipes they cover, and blocks of any values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

FLT_MAX = np.finfo(np.float32).max
TARGET = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
LIMIT = {"e4m3": np.float32(448), "e5m2": np.float32(57344), "e2m1": np.float32(6)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: recipe, width of its blocks, their height in W, role, format
CASES = [
    ("blockwise", 128, 128, "input", "e4m3"),
    ("blockwise", 128, 128, "weight", "e4m3"),
    ("blockwise-hybrid", 128, 128, "grad_output", "e5m2"),
    ("blockwise(power_of_two=False)", 128, 128, "input", "e4m3"),
    ("blockwise-hybrid(power_of_two=False)", 128, 128, "grad_output", "e5m2"),
    ("blockwise(epsilon=0.5)", 128, 128, "weight", "e4m3"),
    ("mxfp8", 32, 1, "input", "e4m3"),
    ("mxfp8", 32, 1, "weight", "e4m3"),
    ("mxfp8-hybrid", 32, 1, "grad_output", "e5m2"),
    ("nvfp4", 16, 16, "input", "e2m1"),
    ("nvfp4", 16, 16, "weight", "e2m1"),
]
RECIPES = pytest.mark.parametrize(("name", "width", "tall", "role", "fmt"), CASES)


class Reference(NamedTuple):
    codes: npt.NDArray[np.uint8]
    stored: npt.NDArray[Any]
    scaled: npt.NDArray[np.float32]
    q: npt.NDArray[np.float64]


def amax_of(values: npt.NDArray[np.float32]) -> np.float32:
    """As fmaxf finds it, which passes over NaN."""
    # Not numpy's fmax, which a signalling NaN turns into NaN; fmaxf on a GPU passes over both kinds.
    return np.float32(np.where(np.isnan(values), 0, np.abs(values)).max(initial=0.0))


def blockwise_scale(amax: np.float32, limit: np.float32, name: str, dtype: torch.dtype) -> tuple[Any, np.float32, float]:
    """`compute_scale_from_types` of recipe_common.cuh: what is stored, the multiplier, what a code is worth."""
    amax = max(amax, np.float32(0.5 if "epsilon" in name else 0))
    scale = np.float32(1)
    if 0 < amax < np.inf:
        scale = limit / amax
        if np.isinf(scale):
            scale = np.float32(torch.finfo(dtype).max)
        if "False" not in name:
            scale = np.float32(2.0 ** (math.frexp(scale)[1] - 1))
    return np.float32(1) / scale, scale, 1 / float(scale)


def mxfp8_scale(amax: np.float32, limit: np.float32) -> tuple[Any, np.float32, float]:
    """quantize_mxfp8.cuh: the power of two at or above amax / limit."""
    quotient = float(amax * (np.float32(1) / limit))
    exponent = 127
    if quotient < 2.0**127:
        mantissa, exponent = math.frexp(quotient)
        exponent = max(-127, exponent - (mantissa == 0.5) if quotient else -127)
    return np.uint8(exponent + 127), np.float32(2.0**-exponent), 2.0**exponent


def nvfp4_scale(amax: np.float32, whole: np.float32) -> tuple[Any, np.float32, float]:
    """core_nvfp4.cuh"""
    encode = min(np.float32(448 * 6) / whole, FLT_MAX) if 0 < whole < np.inf else np.float32(1)
    wanted = min(amax * (encode * (np.float32(1) / np.float32(6))), np.float32(448))
    stored = wanted.astype(ml_dtypes.float8_e4m3fn)
    product = np.float32(stored) * (np.float32(1) / encode)
    scale = min(np.float32(1) / product, FLT_MAX) if product else FLT_MAX
    return stored, np.float32(scale), float(stored) / float(encode)


def reference(x: torch.Tensor, name: str, width: int, high: int, fmt: str) -> Reference:
    """A matrix, scales one block after the other."""
    values, limit = x.float().numpy(), LIMIT[fmt]
    whole = amax_of(values)
    rows, columns = values.shape
    stored, scales, worths = [], [], []
    for r in range(0, rows, high):
        amaxes = [amax_of(values[r : r + high, c : c + width]) for c in range(0, columns, width)]
        if name.startswith("blockwise"):
            found = [blockwise_scale(amax, limit, name, x.dtype) for amax in amaxes]
        elif name.startswith("mxfp8"):
            found = [mxfp8_scale(amax, limit) for amax in amaxes]
        else:
            found = [nvfp4_scale(amax, whole) for amax in amaxes]
        for row, of in zip((stored, scales, worths), zip(*found, strict=True), strict=True):
            row.append(of)

    def spread(of_blocks: list[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.array(of_blocks, dtype).repeat(high, 0).repeat(width, 1)[:rows, :columns]

    scaled = values * spread(scales, np.float32)
    # NVIDIA's FP4 has no NaN and takes 6, ml_dtypes takes -0.
    real = np.where(np.isnan(scaled) & (fmt == "e2m1"), np.float32(6), scaled)
    cast = np.clip(real, -limit, limit).astype(TARGET[fmt])
    return Reference(cast.view(np.uint8), np.array(stored), scaled, cast.astype(np.float64) * spread(worths, np.float64))


def random_blocks(n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, width]: blocks from the smallest subnormal to the largest value, zeros, outliers, constants, a few not finite."""
    g = torch.Generator().manual_seed(width)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 8, math.log2(info.max)

    def some(share: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g) < share

    magnitude = torch.exp2(low + (high - low) * torch.rand(n, 1, generator=g, dtype=torch.float64))
    x = torch.randn(n, width, generator=g, dtype=torch.float64) * magnitude
    x = torch.where(some(0.02, n, width), x * 2.0 ** torch.randint(0, 16, (n, width), generator=g), x)
    x = torch.where(some(0.1, n, width) | some(0.03, n, 1), 0.0 * x, x)  # zeros of both signs, and blocks of nothing else
    x = torch.where(some(0.03, n, 1), magnitude, x)
    x = x.clamp(-info.max, info.max)
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.where(some(0.01, n, 1) & some(0.1, n, width), value, x)
    return x.to(dtype)

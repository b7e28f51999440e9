"""The sums of the CPU kernel under scales that are powers of two, against a formula of their own, value by value."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from nemo_fp8_debug.kernels import count_histogram, quantization_sums
from nemo_fp8_debug.numerics.recipe import parse_recipe

#: recipe, role, rows and columns of a block, type of the codes
POWERS_OF_TWO = [
    ("mxfp8", "input", (1, 32), ml_dtypes.float8_e4m3fn),
    ("mxfp8-hybrid", "grad_output", (1, 32), ml_dtypes.float8_e5m2),
    ("blockwise", "input", (1, 128), ml_dtypes.float8_e4m3fn),
    ("blockwise", "weight", (128, 128), ml_dtypes.float8_e4m3fn),
    ("blockwise-hybrid", "grad_output", (1, 128), ml_dtypes.float8_e5m2),
    ("blockwise(epsilon=0.5)", "input", (1, 128), ml_dtypes.float8_e4m3fn),
]


def of_patterns(patterns: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def ladder(columns: int) -> torch.Tensor:
    """One value of 2 and, ever smaller, others: in each row one distance of theirs to it, down to 2^-40."""
    below = torch.exp2(-torch.arange(128.0) / 3)[:, None].expand(128, columns).clone()
    below[:, ::128] = 2
    return below.bfloat16()


def tensors(columns: int = 1280) -> dict[str, torch.Tensor]:
    """[128, columns] each."""
    g, rows = torch.Generator().manual_seed(0), np.arange(128)[:, None]
    normal = torch.randn(128, columns, generator=g)
    wide = normal * torch.exp2(12 * torch.randn(128, columns, generator=g))
    steps = normal * torch.exp2(-3.0 * (torch.arange(columns) // 32))
    return {
        "normal": normal.bfloat16(),
        "wide": wide.bfloat16(),
        "blocks of very different size": steps.bfloat16(),
        "each significand, constant": of_patterns(np.broadcast_to(0x3F80 + rows, (128, columns))),
        "each significand, in the smallest binades": of_patterns(np.broadcast_to(64 * rows, (128, columns))),
        "each significand, in the largest binade": of_patterns(np.broadcast_to(0x7F00 + rows, (128, columns))),
        "far below the largest": ladder(columns),
        "small and large": (normal * torch.exp2(-torch.arange(128.0) / 2)[:, None]).bfloat16(),
        "half zeros": torch.where(normal > 0, normal, -0.0).bfloat16(),
        "zeros": torch.zeros(128, columns, dtype=torch.bfloat16),
    }


def by_value(x: torch.Tensor, epsilon: float, block: tuple[int, int], codes: type) -> dict[str, float]:
    """The sums value by value under the power of two that the block's amax leads to."""
    (rows, columns), (high, wide), limit = x.shape, block, float(ml_dtypes.finfo(codes).max)
    tiles = x.double().numpy().reshape(rows // high, high, columns // wide, wide)
    amax = np.abs(tiles).max((1, 3), keepdims=True)
    there = np.where(amax > 0, np.maximum(amax, epsilon), limit)
    # 2^floor(log2(limit / amax)), which for both recipes is the largest power of two that leaves amax within the limit
    scale = np.exp2(np.frexp(limit / there)[1] - 1.0)
    scale = np.minimum(scale, 2.0**127)
    q = (tiles * scale).astype(np.float32).astype(codes).astype(np.float64) / scale
    return {
        "underflows": int(((tiles != 0) & (q == 0)).sum()),
        "overflows": 0,
        "sum_error2": math.fsum(((tiles - q) ** 2).flat),
        "sum_xq": math.fsum((tiles * q).flat),
        "sum_q2": math.fsum((q * q).flat),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "role", "block", "codes"), POWERS_OF_TWO)
def test_sums_under_powers_of_two(name: str, role: str, block: tuple[int, int], codes: type, dtype: torch.dtype) -> None:
    recipe = parse_recipe(name)
    for what, made in tensors().items():
        x = made.to(dtype).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        got = quantization_sums(x, recipe.scaling, role, recipe.get_format(role), count_histogram(x))
        want = by_value(x, 0.5 if "epsilon" in name else 0, block, codes)
        assert {name: getattr(got, name).item() for name in want} == {
            name: pytest.approx(value, rel=1e-12, abs=0.0) for name, value in want.items()
        }, what

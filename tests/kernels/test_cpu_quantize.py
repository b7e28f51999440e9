"""The one-pass cast of a CPU against ml_dtypes and numpy float32, on every pattern of bfloat16 and any of float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import all_patterns

from nemo_fp8_debug import kernels
from nemo_fp8_debug.kernels.cpu import quantize
from nemo_fp8_debug.numerics.formats import E2M1, E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.metrics import compute_amax

NUMPY = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float32: np.float32,
}
SCALES = st.floats(0, width=32) | st.just(math.nan)
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "one row repeated": lambda x: x[:1].expand(64, 512),
    "empty": lambda x: x[:0],
    "one value": lambda x: x[3, 4],
}


def oracle(x: torch.Tensor, scale: float, fmt: FloatFormat) -> torch.Tensor:
    by = np.float32(scale)
    with np.errstate(all="ignore"):
        codes = np.clip(x.float().numpy() * by, -fmt.max, fmt.max).astype(NUMPY[fmt.name])
        values = codes.astype(np.float32) * (np.float32(1) / by)
        return torch.from_numpy(np.asarray(values.astype(NUMPY[x.dtype]).astype(np.float32))).to(x.dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit, signs of zeros too; NaN is NaN, whatever its payload."""
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), ~number)
    bits = BITS[found.dtype]
    assert torch.equal(found[number].view(bits), expected[number].view(bits))


@settings(max_examples=30)
@given(scale=SCALES, fmt=st.sampled_from([E4M3, E5M2]))
@example(scale=math.inf, fmt=E4M3)
@example(scale=0.0, fmt=E5M2)
@example(scale=2.0**-149, fmt=E4M3)
def test_all_patterns_of_bfloat16_under_any_scale(scale: float, fmt: FloatFormat) -> None:
    x = all_patterns(torch.bfloat16)
    assert_same(kernels.quantize_dequantize(x, torch.tensor(scale), fmt), oracle(x, scale, fmt))


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=70), scale=SCALES, fmt=st.sampled_from([E4M3, E5M2])
)
def test_any_pattern_of_float32_under_any_scale(bits: list[int], scale: float, fmt: FloatFormat) -> None:
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert_same(kernels.quantize_dequantize(x, torch.tensor(scale), fmt), oracle(x, scale, fmt))
    assert torch.equal(kernels.amax(x), compute_amax(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype))
    found = kernels.quantize_dequantize(x, torch.tensor(50.0), E4M3)
    assert torch.equal(found, oracle(x, 50.0, E4M3))
    assert found.shape == x.shape
    assert torch.equal(kernels.amax(x), compute_amax(x))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("n", [1, quantize.GRAIN - 1, quantize.GRAIN + 1, 5 * quantize.GRAIN + 3])
def test_shares_of_threads_cover_all_values(n: int, threads: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16()
    assert_same(
        quantize.quantize_dequantize(x, 50.0, float(np.float32(1) / np.float32(50)), E4M3, threads),
        oracle(x, 50.0, E4M3),
    )
    assert torch.equal(quantize.amax(x, threads), compute_amax(x))
    x[-1] = -1e30
    assert torch.equal(quantize.amax(x, threads), compute_amax(x))


def test_formats_of_four_bits_are_cast_by_torch() -> None:
    x = torch.tensor([0.4, 0.75, 5.5, -7.0])
    assert kernels.quantize_dequantize(x, torch.tensor(1.0), E2M1).tolist() == [0.5, 1.0, 6.0, -6.0]

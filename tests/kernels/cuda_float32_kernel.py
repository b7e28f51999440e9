"""The kernels of float32 tensors in Numba's simulator, which runs their source without a device, against plain torch.

A process of its own, with `NUMBA_ENABLE_CUDASIM=1`: Numba looks at that when it is imported.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from cuda_simulator import float32_moments as moments
from cuda_simulator import float32_sums as sums
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_fp8_debug.kernels.cuda import float32
from nemo_fp8_debug.numerics.formats import BF16, E4M3, E5M2, FP16, FloatFormat
from nemo_fp8_debug.numerics.metrics import (
    QuantizationSums,
    ValueMoments,
    compute_float32_moments,
    quantization_sums_of_float32,
)

FORMATS = E4M3, E5M2, BF16, FP16
GRIDS = (1, 16), (3, 8), (1, 32), (2, 1)


def equal(got: ValueMoments | QuantizationSums, expected: ValueMoments | QuantizationSums, what: str) -> None:
    """Counts and extremes equal, sums to 1e-12; dtypes and shapes the same."""
    for field in fields(got):
        exact = 1e-12 if field.name.startswith("sum_") else 0
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        torch.testing.assert_close(
            ours, theirs, rtol=exact, atol=0, equal_nan=True, msg=f"{what} {field.name}: {ours} {theirs}"
        )


def check_moments(x: torch.Tensor, grid: tuple[int, int] = GRIDS[0]) -> None:
    equal(moments(x, grid), compute_float32_moments(x), f"{tuple(x.shape)} {grid}")


def check_sums(x: torch.Tensor, scale: float, fmt: FloatFormat, grid: tuple[int, int] = GRIDS[0]) -> None:
    expected = quantization_sums_of_float32(x, torch.tensor(scale), fmt)
    equal(sums(x, scale, fmt, grid), expected, f"{tuple(x.shape)} {scale} {fmt.name} {grid}")


def wide(n: int) -> torch.Tensor:
    """Values of many sizes, with zeros of both signs, subnormals and what is not finite among them."""
    x = torch.randn(n) * (8 * torch.randn(n)).exp2()
    x[::7] = 0.0
    x[1::29] = -0.0
    others = [torch.nan, torch.inf, -torch.inf, 1e-45, -1e-39, torch.finfo(torch.float32).max, 3e38, -2e-38]
    x[3 :: max(1, n // 9)][: len(others)] = torch.tensor(others[: len(x[3 :: max(1, n // 9)])])
    return x


def of_any_size_and_grid() -> None:
    for i, n in enumerate((1, 2, 31, 33, 128, 129, 401)):
        grid = GRIDS[i % len(GRIDS)]
        check_moments(wide(n), grid)
        check_sums(wide(n), 3.7, FORMATS[i % len(FORMATS)], grid)


def under_scales_that_overflow_and_underflow() -> None:
    x = wide(130)
    x[4], x[5] = 448 * (1 + 2.0**-22), 448 * (1 + 2.0**-21)  # as far as the rounding of a scale goes, and past it
    for fmt in (E4M3, E5M2):
        for scale in (1.0, 1e-12, 3e-39, 1e12, torch.finfo(torch.float32).max):
            check_sums(x, scale, fmt)
        assert sums(x, 1e-12, fmt, GRIDS[0]).underflows > 90
        assert sums(x, 1e12, fmt, GRIDS[0]).overflows > 90


def what_a_format_holds_exactly_and_what_lies_halfway() -> None:
    """Every code, and every tie between two of them: errors are zero, or half a spacing."""
    for fmt, bits in ((E4M3, torch.uint8), (E5M2, torch.uint8)):
        codes = torch.arange(0x80, dtype=bits).view(fmt.dtype).float()
        codes = codes[codes.isfinite()]
        ties = (codes[1:] + codes[:-1]) / 2
        assert sums(codes, 1.0, fmt, GRIDS[0]).sum_error2 == 0
        for x in (codes, ties, -ties / 3):  # a third of a code is next to what stands for it
            check_sums(x, 1.0, fmt)
            check_sums(x, 3.0, fmt)
    check_sums(torch.tensor([2.0**-133, 2.0**-134, 3 * 2.0**-134]), 1.0, BF16)
    check_sums(torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 5 * 2.0**-8]), 1.0, BF16)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def any_patterns(data: st.DataObject) -> None:
    """All values that there are, under any scale."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bits = rng.integers(0, 1 << 32, data.draw(st.integers(1, 90)), np.uint32)
    if data.draw(st.booleans()):
        bits = bits & np.uint32(0x83FFFFFF) | np.uint32(data.draw(st.sampled_from([0, 30, 31, 60])) << 25)
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    grid = data.draw(st.sampled_from(GRIDS))
    check_moments(x, grid)
    check_sums(x, 2.0 ** data.draw(st.integers(-100, 100)) * 1.1, data.draw(st.sampled_from(FORMATS)), grid)


def tensors_of_zeros_and_of_nothing_finite() -> None:
    for value in (-0.0, torch.nan, -torch.inf):
        check_moments(torch.full((17,), value), GRIDS[1])
        check_sums(torch.full((17,), value), 2.0, E4M3, GRIDS[1])


def empty_tensors() -> None:
    x, scale = torch.zeros(3, 0), torch.tensor(2.0)
    equal(float32.compute_float32_moments(x), compute_float32_moments(x), "empty")
    equal(float32.quantization_sums(x, scale, E4M3), quantization_sums_of_float32(x, scale, E4M3), "empty")


def nothing_depends_on_the_run() -> None:
    x = wide(300)
    for of in (lambda: moments(x, GRIDS[1]), lambda: sums(x, 0.7, E5M2, GRIDS[1])):
        first, second = of(), of()
        assert all(getattr(first, f.name).equal(getattr(second, f.name)) for f in fields(first) if f.name != "median")


if __name__ == "__main__":
    torch.manual_seed(0)
    of_any_size_and_grid()
    under_scales_that_overflow_and_underflow()
    what_a_format_holds_exactly_and_what_lies_halfway()
    any_patterns()
    tensors_of_zeros_and_of_nothing_finite()
    empty_tensors()
    nothing_depends_on_the_run()
    print("measured")

"""The kernel of block sums in Numba's simulator, which runs its source without a device, against plain torch operations.

A process of its own, with `NUMBA_ENABLE_CUDASIM=1`: Numba looks at that when it is imported.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from cuda_simulator import block_sums as sums
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cuda import blocks
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E2M1, E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.histogram import DTYPES
from nemo_fp8_debug.numerics.recipe import parse_recipe

BF16, FP16 = DTYPES
GRIDS = (1, 32), (2, 32), (1, 64)


def rule_of(recipe: str) -> BlockScalingRule:
    rule = parse_recipe(recipe).scaling
    assert isinstance(rule, BlockScalingRule)
    return rule


BLOCKWISE, ANY_SCALE, MXFP8, NVFP4 = map(rule_of, ("blockwise", "blockwise(power_of_two=False)", "mxfp8", "nvfp4"))
#: each rule with each shape of block that it has
CASES = [
    (BLOCKWISE, "input", E4M3),
    (ANY_SCALE, "grad_output", E5M2),
    (ANY_SCALE, "weight", E4M3),
    (MXFP8, "input", E4M3),
    (MXFP8, "grad_output", E5M2),
    (NVFP4, "input", E2M1),
    (NVFP4, "weight", E2M1),
]


def at(address: int, x: torch.Tensor) -> torch.Tensor:
    """A copy that starts so many values behind an 8-byte boundary."""
    room = torch.from_numpy(np.zeros(x.numel() // 4 + 2, np.uint64).view(np.int16)).view(x.dtype)
    return room[address : address + x.numel()].view(x.shape).copy_(x)


def check(x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, grid: tuple[int, int] = GRIDS[0]) -> None:
    got, expected = sums(x, rule, role, fmt, grid), quantization_sums_in_blocks(x, rule, role, fmt)
    what = f"{rule} {role} {fmt.name} {x.dtype} {tuple(x.shape)} {grid}"
    assert torch.equal(got.underflows, expected.underflows), what
    assert torch.equal(got.overflows, expected.overflows), what
    for name in ("sum_error2", "sum_xq", "sum_q2"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-12, atol=0, msg=f"{what} {name}")


def wide(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Values of many sizes, a few zeros, and blocks with what is not finite, of zeros and of subnormal values."""
    x = torch.randn(shape) * (3 * torch.randn(shape)).exp2()
    x[torch.rand(shape) < 0.02] = 0
    x = x.to(dtype)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x[-1, -1] = torch.nan
    x[1:2, 16:48] = 0
    x[2:3, 16:48] = torch.finfo(dtype).smallest_normal / 4
    return x


def every_rule_and_dtype() -> None:
    for case in CASES:
        check(wide((18, 36), BF16), *case)
        check(wide((5, 36), FP16), *case)


def several_tiles_and_ragged_edges() -> None:
    shapes: list[tuple[int, int]] = [(130, 20), (3, 261), (5, 260), (1, 1), (33, 18)]
    for i, shape in enumerate(shapes):
        for case in (CASES[0], CASES[2]):
            check(torch.randn(shape).bfloat16(), *case, GRIDS[i % 3])


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def any_patterns_anywhere(data: st.DataObject) -> None:
    """All values that there are, under any rule; rows at any address."""
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    bits = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 1 << 16, (rows, columns), np.uint16)
    if data.draw(st.booleans()):
        bits &= 0x9FFF  # of a few binades, small ones
    x = torch.from_numpy(bits.view(np.int16)).view(data.draw(st.sampled_from(DTYPES)))
    check(at(data.draw(st.integers(0, 3)), x), *data.draw(st.sampled_from(CASES)), data.draw(st.sampled_from(GRIDS)))


def tensors_of_zeros_and_of_nothing_finite() -> None:
    for value in (-0.0, torch.nan, torch.inf):
        for case in (CASES[2], CASES[3], CASES[5]):
            check(torch.full((1, 17), value, dtype=BF16), *case)


def empty_tensors() -> None:
    for shape in ((0, 16), (3, 0), (0,)):
        x, how = torch.zeros(shape, dtype=BF16), (NVFP4, "input", E2M1)
        got, expected = (blocks.block_quantization_sums(x, *how, count_histogram(x)), quantization_sums_in_blocks(x, *how))
        assert all(torch.equal(getattr(got, f.name), getattr(expected, f.name)) for f in fields(got))


def sums_do_not_depend_on_the_run() -> None:
    x = wide((20, 64), BF16)
    first, second = (sums(x, *CASES[1], GRIDS[1]) for _ in range(2))
    assert all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))


def amax_of_any_tensor() -> None:
    """NaN counts for nothing, infinity does."""
    for dtype in DTYPES:
        for value, expected in ((3.0, 3.0), (-3.0, 3.0), (torch.nan, 1.0), (-torch.inf, torch.inf)):
            assert blocks.amax_of_histogram(count_histogram(torch.tensor([1.0, value, 0.5], dtype=dtype))) == expected, (
                dtype,
                value,
            )
        assert blocks.amax_of_histogram(count_histogram(torch.zeros(0, dtype=dtype))) == 0


if __name__ == "__main__":
    torch.manual_seed(0)
    every_rule_and_dtype()
    several_tiles_and_ragged_edges()
    any_patterns_anywhere()
    tensors_of_zeros_and_of_nothing_finite()
    empty_tensors()
    sums_do_not_depend_on_the_run()
    amax_of_any_tensor()
    print("added up")

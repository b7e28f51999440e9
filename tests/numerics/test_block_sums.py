"""Sums over blocks that metrics are made of, by every path, against numpy transcriptions of Transformer Engine's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from block_reference import DTYPES, LIMIT, RECIPES, random_blocks, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.metrics import QuantizationSums, quantization_sums_of_float32
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling


def oracle(x: torch.Tensor, name: str, width: int, high: int, fmt: str) -> dict[str, float]:
    """The sums value by value, from the transcriptions."""
    with np.errstate(all="ignore"):
        made = reference(x, name, width, high, fmt)
    finite = x.isfinite().numpy()
    value, q = x.double().numpy()[finite], made.q[finite]
    beyond = np.abs(made.scaled[finite]) > LIMIT[fmt] * np.float32(1 + 2**-22)
    return {
        "underflows": int(((value != 0) & (q == 0)).sum()),
        "overflows": int((beyond & (q != 0)).sum()),
        "sum_error2": math.fsum((value - q) ** 2),
        "sum_xq": math.fsum(value * q),
        "sum_q2": math.fsum(q * q),
    }


def plain(x: torch.Tensor, *how: Any) -> QuantizationSums:
    return quantization_sums_in_blocks(x, *how, chunk=64)


PATHS: dict[str, Callable[..., QuantizationSums]] = {"kernel": quantization_sums, "plain, in small chunks": plain}


def assert_sums(got: QuantizationSums, want: dict[str, float]) -> None:
    assert {name: getattr(got, name).item() for name in want} == {
        name: pytest.approx(value, rel=1e-12, abs=0.0) for name, value in want.items()
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@RECIPES
def test_sums(name: str, width: int, tall: int, role: str, fmt: str, dtype: torch.dtype, path: str) -> None:
    recipe, high = parse_recipe(name), tall if role == "weight" else 1
    for x in (random_blocks(70, 300, dtype), random_blocks(300, 70, dtype).t(), random_blocks(1, 1, dtype)):
        got = PATHS[path](x, recipe.scaling, role, recipe.get_format(role))
        assert_sums(got, oracle(x, name, width, high, fmt))


@pytest.mark.parametrize("path", PATHS)
@RECIPES
@settings(max_examples=25)
@given(bits=hnp.arrays(np.uint32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.integers(0, 2**32 - 1)))
def test_sums_of_any_bits(
    name: str, width: int, tall: int, role: str, fmt: str, path: str, bits: npt.NDArray[np.uint32]
) -> None:
    recipe, high = parse_recipe(name), tall if role == "weight" else 1
    words = torch.from_numpy(bits.view(np.int32))  # twice as many values of 16 bits
    for dtype in DTYPES:
        x = words.view(dtype)
        assert_sums(PATHS[path](x, recipe.scaling, role, recipe.get_format(role)), oracle(x, name, width, high, fmt))


def odd_one_out(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN and infinity in a few blocks, and a few of zeros and of subnormals."""
    flat = x.flatten()
    flat[7::5003], flat[11::7001] = torch.nan, -torch.inf
    for start in range(600, len(flat), 9000):
        flat[start : start + 200] = 0
        flat[start + 300 : start + 500] = torch.finfo(x.dtype).smallest_normal / 64
    return x


#: of a matrix [80, 2120]: what has gaps in memory, begins in the midst of a word, is not a matrix
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "columns": lambda x: x[3:, 5:1100],
    "columns of whole blocks": lambda x: x[:, 1 : 1 + 2048],
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "one row": lambda x: x[1],
    "one column": lambda x: x[:, :1],
    "three axes": lambda x: x.view(4, 20, 2120).transpose(0, 1),
    "one row, repeated": lambda x: x[:1].expand(70, 2120),
    "rows that overlap": lambda x: x.as_strided((70, 1300), (96, 1)),
    "one value, repeated": lambda x: x[:1, :1].expand(20, 40),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@RECIPES
def test_sums_of_views(name: str, width: int, tall: int, role: str, fmt: str, dtype: torch.dtype, view: str) -> None:
    recipe = parse_recipe(name)
    x = torch.randn(80, 2120, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 2120)
    x = VIEWS[view](odd_one_out(x.to(dtype)))
    want = quantization_sums_in_blocks(x.contiguous(), recipe.scaling, role, recipe.get_format(role))
    got = quantization_sums(x, recipe.scaling, role, recipe.get_format(role))
    assert_sums(got, {name: column.item() for name, column in vars(want).items()})


@pytest.mark.parametrize("binades", [0, 5], ids=["normal", "values over many binades"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@RECIPES
def test_sums_of_a_large_tensor_shared_out_to_threads(
    name: str, width: int, tall: int, role: str, fmt: str, threads: int, binades: int
) -> None:
    recipe, before = parse_recipe(name), torch.get_num_threads()
    z, normal = torch.randn(2, 1050, 1000, generator=torch.Generator().manual_seed(3))
    x = odd_one_out((normal * torch.exp2(binades * z)).bfloat16())
    want = quantization_sums_in_blocks(x, recipe.scaling, role, recipe.get_format(role))
    torch.set_num_threads(threads)
    try:
        got = quantization_sums(x, recipe.scaling, role, recipe.get_format(role))
    finally:
        torch.set_num_threads(before)
    assert_sums(got, {name: column.item() for name, column in vars(want).items()})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_adds_nothing(shape: tuple[int, ...], path: str) -> None:
    for name in ("mxfp8", "nvfp4"):
        recipe = parse_recipe(name)
        got = PATHS[path](torch.zeros(shape), recipe.scaling, "input", recipe.get_format("input"))
        assert [column.tolist() for column in vars(got).values()] == [[0]] * 5


def test_one_block_is_current_scaling() -> None:
    x = torch.randn(100, 100, generator=torch.Generator().manual_seed(4))
    for power_of_two in (True, False):
        recipe = parse_recipe({"name": "blockwise", "power_of_two": power_of_two})
        scale = CurrentScaling(power_of_two=power_of_two).compute_scale(x.abs().amax(), E4M3.max)
        want = quantization_sums_of_float32(x, scale, E4M3)
        got = quantization_sums(x, recipe.scaling, "weight", E4M3)
        assert_sums(got, {name: column.item() for name, column in vars(want).items()})


def test_a_block_whose_nvfp4_scale_is_zero_underflows_and_does_not_overflow() -> None:
    x = torch.cat([torch.full((1, 16), 1e-9), torch.full((1, 16), 6.0)])
    recipe = parse_recipe("nvfp4")
    got = quantization_sums(x, recipe.scaling, "input", recipe.get_format("input"))
    assert (got.underflows.item(), got.overflows.item()) == (16, 0)


def test_infinity_spoils_its_own_block_and_nan_none() -> None:
    x = torch.ones(2, 64)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    recipe = parse_recipe("mxfp8")
    got = recipe.scaling.quantize(x, "input", E4M3)
    assert got.scales.stored[0, 0] == 254
    assert len(set(got.scales.stored.flatten()[1:].tolist())) == 1
    assert torch.equal(got.dequantize()[0, 1:32], torch.zeros(31, dtype=torch.float64))
    assert torch.equal(got.dequantize()[1, 1:], torch.ones(63, dtype=torch.float64))

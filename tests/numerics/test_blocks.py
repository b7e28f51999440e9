"""Block scaling against numpy transcriptions of Transformer Engine's kernels, with the casts of ml_dtypes and gfloat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gfloat
import gfloat.formats as gformats
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3, e8m0_at_least, e8m0_value
from nemo_fp8_debug.numerics.metrics import QuantizationSums, quantization_sums_of_float32
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling

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


def bits_of_codes(codes: torch.Tensor, fmt: str) -> npt.NDArray[np.uint8]:
    return codes.float().numpy().astype(TARGET[fmt]).view(np.uint8)


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


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with NaN and infinity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@RECIPES
def test_codes_and_scales_of_10000_blocks(
    name: str, width: int, tall: int, role: str, fmt: str, dtype: torch.dtype, finite: bool
) -> None:
    recipe, high = parse_recipe(name), tall if role == "weight" else 1
    # Fewer of those in two dimensions, which have 16 and 128 times the values.
    x = random_blocks({1: 10_000, 16: 1_000, 128: 100}[high] * high, width, dtype)
    if finite:
        x = torch.where(x.isfinite(), x, 1.0)
    got = recipe.scaling.quantize(x, role, recipe.format_of(role))
    with np.errstate(all="ignore"):
        want = reference(x, name, width, high, fmt)
    stored = got.scales.stored
    ours = stored.view(torch.uint8).numpy() if stored.dtype != torch.float32 else stored.numpy()
    np.testing.assert_array_equal(ours, want.stored if ours.dtype == np.float32 else want.stored.view(np.uint8))
    real = ~x.isnan().numpy() | (fmt == "e2m1")  # any NaN code is as good as another
    np.testing.assert_array_equal(bits_of_codes(got.codes, fmt)[real], want.codes[real])
    np.testing.assert_array_equal(got.dequantize().numpy()[real], want.q[real])


def test_mxfp8_scales_of_bfloat16_are_exactly_the_power_of_two_at_or_above() -> None:
    """The float32 product that Transformer Engine rounds never carries an amax of 16 bits past a power of two."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for name, limit in (("mxfp8-e4m3", 448), ("mxfp8-hybrid", 57344)):
        recipe = parse_recipe(name)
        fmt = recipe.format_of("grad_output")
        code = recipe.scaling.scales(amax.float()[:, None], amax[-1].float(), fmt, amax.dtype).stored[:, 0]
        worth = 2.0 ** (code.double() - 127) * limit
        assert (amax.double() <= worth).all()
        assert ((amax.double() > worth / 2) | (code == 0)).all()


def test_nvfp4_scales_of_blocks_whose_amax_lies_at_a_tie_of_e4m3() -> None:
    """Where the order of the three factors decides."""
    recipe = parse_recipe("nvfp4")
    values = np.arange(127, dtype=np.uint8).view(TARGET["e4m3"]).astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    for whole in np.random.default_rng(0).uniform(0.1, 100, 40).astype(np.float32):
        amax = (ties * 6 * whole / np.float32(448 * 6)).astype(np.float32)
        amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(np.inf))])
        got = recipe.scaling.scales(
            torch.from_numpy(amax)[:, None], torch.tensor(whole), recipe.format_of("input"), torch.float32
        )
        want = [nvfp4_scale(value, whole) for value in amax]
        assert got.stored.view(torch.uint8)[:, 0].tolist() == [int(stored.view(np.uint8)) for stored, *_ in want]
        assert got.scale[:, 0].tolist() == [float(scale) for _, scale, _ in want]


@pytest.mark.parametrize(
    ("name", "role", "info"),
    [
        ("mxfp8", "input", gformats.format_info_ocp_e4m3),
        ("mxfp8-hybrid", "grad_output", gformats.format_info_ocp_e5m2),
    ],
)
def test_gfloat_encodes_mx_blocks_alike(name: str, role: str, info: gfloat.FormatInfo) -> None:
    x = random_blocks(300, 32, torch.bfloat16)
    x = torch.where(x.isfinite(), x, 1.0)
    recipe = parse_recipe(name)
    got = recipe.scaling.quantize(x, role, recipe.format_of(role))
    block = gfloat.BlockFormatInfo("mx", info, 32, gformats.format_info_ocp_e8m0)
    for values, codes, scale in zip(
        x.double().numpy(), got.codes.view(torch.uint8).tolist(), got.scales.stored[:, 0].tolist(), strict=True
    ):
        factor = 2.0 ** (scale - 127)
        assert [scale, *codes] == list(gfloat.block.encode_block(block, factor, values / factor))


def test_gfloat_rounds_nvfp4_codes_alike() -> None:
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    recipe = parse_recipe("nvfp4")
    got = recipe.scaling.quantize(x, "input", recipe.format_of("input"))
    scaled = (x * got.scales.scale).double().numpy()
    want = gfloat.round_ndarray(gformats.format_info_ocp_e2m1, scaled, sat=True)
    np.testing.assert_array_equal(got.codes.double().numpy(), want)


def test_e8m0_is_that_of_ml_dtypes_and_rounds_up() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    np.testing.assert_array_equal(e8m0_value(codes).numpy(), codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    bits = torch.randint(0, 0x7F800000, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    x = torch.cat([bits.view(torch.float32), e8m0_value(codes[:255]).float()])
    above = e8m0_value(e8m0_at_least(x))
    assert ((above >= x.double()) | (above == 2.0**127)).all()
    assert ((above / 2 < x.double()) | (above == 2.0**-127)).all()
    assert e8m0_at_least(torch.tensor([torch.inf, torch.nan])).tolist() == [254, 255]


SHAPES = [(1, 1), (3, 5), (40, 300), (129, 257), (130, 16), (2, 3, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@RECIPES
def test_blocks_at_the_edges_are_filled_up_with_zeros(
    name: str, width: int, tall: int, role: str, fmt: str, shape: tuple[int, ...]
) -> None:
    recipe = parse_recipe(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = x.reshape(-1, shape[-1])
    whole = torch.zeros(math.ceil(len(rows) / tall) * tall, math.ceil(shape[-1] / width) * width, dtype=x.dtype)
    whole[: len(rows), : shape[-1]] = rows
    got = recipe.scaling.quantize(x, role, recipe.format_of(role))
    want = recipe.scaling.quantize(whole, role, recipe.format_of(role))
    assert got.codes.shape == x.shape
    codes = want.codes.float()[: len(rows), : shape[-1]]
    assert torch.equal(got.codes.float().reshape(rows.shape), codes)
    assert torch.equal(got.dequantize().reshape(rows.shape), want.dequantize()[: len(rows), : shape[-1]])


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
        got = PATHS[path](x, recipe.scaling, role, recipe.format_of(role))
        assert_sums(got, oracle(x, name, width, high, fmt))


@pytest.mark.parametrize("path", PATHS)
@RECIPES
@settings(deadline=None, max_examples=25)
@given(bits=hnp.arrays(np.uint32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.integers(0, 2**32 - 1)))
def test_sums_of_any_bits(
    name: str, width: int, tall: int, role: str, fmt: str, path: str, bits: npt.NDArray[np.uint32]
) -> None:
    recipe, high = parse_recipe(name), tall if role == "weight" else 1
    words = torch.from_numpy(bits.view(np.int32))  # twice as many values of 16 bits
    for dtype in DTYPES:
        x = words.view(dtype)
        assert_sums(PATHS[path](x, recipe.scaling, role, recipe.format_of(role)), oracle(x, name, width, high, fmt))


def odd_one_out(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN and infinity in a few blocks, and a few of zeros and of subnormals."""
    flat = x.flatten()
    flat[7::5003], flat[11::7001] = torch.nan, -torch.inf
    for start in range(600, len(flat), 9000):
        flat[start : start + 200] = 0
        flat[start + 300 : start + 500] = torch.finfo(x.dtype).smallest_normal / 64
    return x


#: of a matrix [80, 2120]: what has gaps in memory, begins in the midst of a word, takes several panels, is not a matrix
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "columns": lambda x: x[3:, 5:1100],
    "columns that fill panels": lambda x: x[:, 1 : 1 + 2048],
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
    want = quantization_sums_in_blocks(x.contiguous(), recipe.scaling, role, recipe.format_of(role))
    got = quantization_sums(x, recipe.scaling, role, recipe.format_of(role))
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
    want = quantization_sums_in_blocks(x, recipe.scaling, role, recipe.format_of(role))
    torch.set_num_threads(threads)
    try:
        got = quantization_sums(x, recipe.scaling, role, recipe.format_of(role))
    finally:
        torch.set_num_threads(before)
    assert_sums(got, {name: column.item() for name, column in vars(want).items()})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_adds_nothing(shape: tuple[int, ...], path: str) -> None:
    for name in ("mxfp8", "nvfp4"):
        recipe = parse_recipe(name)
        got = PATHS[path](torch.zeros(shape), recipe.scaling, "input", recipe.format_of("input"))
        assert [column.tolist() for column in vars(got).values()] == [[0]] * 5


def test_one_block_is_current_scaling() -> None:
    x = torch.randn(100, 100, generator=torch.Generator().manual_seed(4))
    for power_of_two in (True, False):
        recipe = parse_recipe({"name": "blockwise", "power_of_two": power_of_two})
        scale = CurrentScaling(power_of_two=power_of_two).scale(x.abs().amax(), E4M3.max)
        want = quantization_sums_of_float32(x, scale, E4M3)
        got = quantization_sums(x, recipe.scaling, "weight", E4M3)
        assert_sums(got, {name: column.item() for name, column in vars(want).items()})


def test_a_block_whose_nvfp4_scale_is_zero_underflows_and_does_not_overflow() -> None:
    x = torch.cat([torch.full((1, 16), 1e-9), torch.full((1, 16), 6.0)])
    recipe = parse_recipe("nvfp4")
    got = quantization_sums(x, recipe.scaling, "input", recipe.format_of("input"))
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


VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)


@RECIPES
@settings(deadline=None, max_examples=40)
@given(values=VALUES, k=st.integers(-20, 20))
def test_a_power_of_two_passes_through(
    name: str, width: int, tall: int, role: str, fmt: str, values: npt.NDArray[np.float32], k: int
) -> None:
    if "epsilon" in name:
        return  # an amax below it is no amax of the tensor
    values = np.where(np.abs(values) < 2**-60, np.float32(0), values)
    recipe, x = parse_recipe(name), torch.from_numpy(values)
    once = recipe.scaling.quantize(x, role, recipe.format_of(role))
    moved = recipe.scaling.quantize(x * 2.0**k, role, recipe.format_of(role))
    assert torch.equal(once.codes.float(), moved.codes.float())
    assert torch.equal(once.dequantize() * 2.0**k, moved.dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "mxfp8-hybrid", "blockwise-hybrid"])
@settings(deadline=None, max_examples=60)
@given(values=VALUES)
def test_values_under_powers_of_two_are_kept_the_second_time(name: str, values: npt.NDArray[np.float32]) -> None:
    recipe = parse_recipe(name)
    for role in ("input", "weight", "grad_output"):
        once = recipe.scaling.quantize(torch.from_numpy(values), role, recipe.format_of(role)).dequantize()
        twice = recipe.scaling.quantize(once.float(), role, recipe.format_of(role)).dequantize()
        assert torch.equal(once, twice)

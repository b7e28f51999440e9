"""Codes and scales of blocks against numpy transcriptions of Transformer Engine's kernels, ml_dtypes and gfloat."""

from __future__ import annotations

import math

import gfloat
import gfloat.formats as gformats
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from block_reference import DTYPES, RECIPES, TARGET, nvfp4_scale, random_blocks, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from long import long_but

from nemo_fp8_debug.numerics.formats import decode_e8m0, round_up_to_e8m0
from nemo_fp8_debug.numerics.recipe import parse_recipe


def bits_of_codes(codes: torch.Tensor, fmt: str) -> npt.NDArray[np.uint8]:
    return codes.float().numpy().astype(TARGET[fmt]).view(np.uint8)


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with NaN and infinity"])
# Long tests rest on nemo_fp8_debug/numerics/*.py.
@pytest.mark.parametrize("dtype", long_but(DTYPES[:1], DTYPES), ids=str)
@RECIPES
def test_codes_and_scales_of_10000_blocks(
    name: str, width: int, tall: int, role: str, fmt: str, dtype: torch.dtype, finite: bool
) -> None:
    recipe, high = parse_recipe(name), tall if role == "weight" else 1
    # Fewer of those in two dimensions, which have 16 and 128 times the values.
    x = random_blocks({1: 10_000, 16: 1_000, 128: 100}[high] * high, width, dtype)
    if finite:
        x = torch.where(x.isfinite(), x, 1.0)
    got = recipe.scaling.quantize(x, role, recipe.get_format(role))
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
        fmt = recipe.get_format("grad_output")
        code = recipe.scaling.compute_scales(amax.float()[:, None], amax[-1].float(), fmt, amax.dtype).stored[:, 0]
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
        got = recipe.scaling.compute_scales(
            torch.from_numpy(amax)[:, None], torch.tensor(whole), recipe.get_format("input"), torch.float32
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
    got = recipe.scaling.quantize(x, role, recipe.get_format(role))
    block = gfloat.BlockFormatInfo("mx", info, 32, gformats.format_info_ocp_e8m0)
    for values, codes, scale in zip(
        x.double().numpy(), got.codes.view(torch.uint8).tolist(), got.scales.stored[:, 0].tolist(), strict=True
    ):
        factor = 2.0 ** (scale - 127)
        assert [scale, *codes] == list(gfloat.block.encode_block(block, factor, values / factor))


def test_gfloat_rounds_nvfp4_codes_alike() -> None:
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    recipe = parse_recipe("nvfp4")
    got = recipe.scaling.quantize(x, "input", recipe.get_format("input"))
    scaled = (x * got.scales.scale).double().numpy()
    want = gfloat.round_ndarray(gformats.format_info_ocp_e2m1, scaled, sat=True)
    np.testing.assert_array_equal(got.codes.double().numpy(), want)


def test_e8m0_is_that_of_ml_dtypes_and_rounds_up() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    np.testing.assert_array_equal(
        decode_e8m0(codes).numpy(), codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    )
    bits = torch.randint(0, 0x7F800000, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    x = torch.cat([bits.view(torch.float32), decode_e8m0(codes[:255]).float()])
    above = decode_e8m0(round_up_to_e8m0(x))
    assert ((above >= x.double()) | (above == 2.0**127)).all()
    assert ((above / 2 < x.double()) | (above == 2.0**-127)).all()
    assert round_up_to_e8m0(torch.tensor([torch.inf, torch.nan])).tolist() == [254, 255]


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
    got = recipe.scaling.quantize(x, role, recipe.get_format(role))
    want = recipe.scaling.quantize(whole, role, recipe.get_format(role))
    assert got.codes.shape == x.shape
    codes = want.codes.float()[: len(rows), : shape[-1]]
    assert torch.equal(got.codes.float().reshape(rows.shape), codes)
    assert torch.equal(got.dequantize().reshape(rows.shape), want.dequantize()[: len(rows), : shape[-1]])


VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)


@RECIPES
@settings(max_examples=40)
@given(values=VALUES, k=st.integers(-20, 20))
def test_a_power_of_two_passes_through(
    name: str, width: int, tall: int, role: str, fmt: str, values: npt.NDArray[np.float32], k: int
) -> None:
    if "epsilon" in name:
        return  # an amax below it is no amax of the tensor
    values = np.where(np.abs(values) < 2**-60, np.float32(0), values)
    recipe, x = parse_recipe(name), torch.from_numpy(values)
    once = recipe.scaling.quantize(x, role, recipe.get_format(role))
    moved = recipe.scaling.quantize(x * 2.0**k, role, recipe.get_format(role))
    assert torch.equal(once.codes.float(), moved.codes.float())
    assert torch.equal(once.dequantize() * 2.0**k, moved.dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "mxfp8-hybrid", "blockwise-hybrid"])
@settings(max_examples=60)
@given(values=VALUES)
def test_values_under_powers_of_two_are_kept_the_second_time(name: str, values: npt.NDArray[np.float32]) -> None:
    recipe = parse_recipe(name)
    for role in ("input", "weight", "grad_output"):
        once = recipe.scaling.quantize(torch.from_numpy(values), role, recipe.get_format(role)).dequantize()
        twice = recipe.scaling.quantize(once.float(), role, recipe.get_format(role)).dequantize()
        assert torch.equal(once, twice)

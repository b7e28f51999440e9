"""The saturating cast against three independent implementations, bit by bit."""

from __future__ import annotations

import gfloat
import gfloat.formats as gformats
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import all_patterns

from nemo_fp8_debug.numerics.formats import BF16, E2M1, E4M3, E5M2, FORMATS, FP16, FloatFormat, decode_codes, saturating_cast

ML_DTYPE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
GFLOAT = {
    "e4m3": gformats.format_info_ocp_e4m3,
    "e5m2": gformats.format_info_ocp_e5m2,
    "e2m1": gformats.format_info_ocp_e2m1,
    "bf16": gformats.format_info_bfloat16,
    "fp16": gformats.format_info_binary16,
}


def random_float32() -> torch.Tensor:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def ties_and_neighbors() -> torch.Tensor:
    """Half way between any two neighbors of each narrow format, and the float32 values next to it."""
    ties = []
    for name, codes in (("e4m3", 256), ("e5m2", 256), ("e2m1", 16)):
        values = np.unique(np.arange(codes, dtype=np.uint8).view(ML_DTYPE[name]).astype(np.float32))
        values = values[np.isfinite(values)]
        ties.append((values[1:] + values[:-1]) / 2)
    tie = np.concatenate(ties)
    up, down = np.nextafter(tie, np.float32(np.inf)), np.nextafter(tie, np.float32(-np.inf))
    return torch.from_numpy(np.concatenate([tie, up, down]))


INPUTS = {
    "all-bf16": lambda: all_patterns(torch.bfloat16).float(),
    "all-fp16": lambda: all_patterns(torch.float16).float(),
    "random-float32": random_float32,
    "ties": ties_and_neighbors,
}


@pytest.fixture(params=INPUTS, scope="module")
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    return INPUTS[request.param]()


def assert_same_bits(got: torch.Tensor, want: npt.NDArray[np.float32]) -> None:
    """Equal as float32 bits, so that the sign of a zero counts; any NaN equals any other."""
    ours = got.float().numpy()
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(want))
    real = ~np.isnan(want)
    np.testing.assert_array_equal(ours[real].view(np.uint32), want[real].view(np.uint32))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
class TestSaturatingCast:
    def test_equals_torch_after_clamping(self, fmt: FloatFormat, x: torch.Tensor) -> None:
        got = saturating_cast(x, fmt)
        assert got.dtype == fmt.dtype
        assert_same_bits(got, x.clamp(-fmt.max, fmt.max).to(fmt.dtype).float().numpy())

    def test_equals_ml_dtypes(self, fmt: FloatFormat, x: torch.Tensor) -> None:
        target = ML_DTYPE[fmt.name]
        limit = np.float32(ml_dtypes.finfo(target).max)
        with np.errstate(invalid="ignore"):  # NaN
            want = np.clip(x.numpy(), -limit, limit).astype(target).astype(np.float32)
        assert_same_bits(saturating_cast(x, fmt), want)

    def test_equals_gfloat(self, fmt: FloatFormat, x: torch.Tensor) -> None:
        with np.errstate(invalid="ignore"):  # NaN
            want = gfloat.round_ndarray(GFLOAT[fmt.name], x.numpy().astype(np.float64), sat=True)
            assert_same_bits(saturating_cast(x, fmt), want.astype(np.float32))

    def test_half_of_the_smallest_value_rounds_to_zero_and_anything_above_does_not(
        self, fmt: FloatFormat, x: torch.Tensor
    ) -> None:
        finite = x[x.isfinite()]
        lost = saturating_cast(finite, fmt).float() == 0
        assert torch.equal(lost, finite.abs() <= fmt.min_subnormal / 2)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_code_is_decoded_as_ml_dtypes_does_wherever_it_lies(fmt: FloatFormat) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    want = codes.view(ML_DTYPE[fmt.name]).astype(np.float32)
    given = torch.from_numpy(codes).view(fmt.dtype)
    assert_same_bits(decode_codes(given, fmt), want)
    turned = decode_codes(given.T, fmt)
    assert_same_bits(turned, want.T)
    assert turned.stride() == given.T.stride()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
class TestLimits:
    def test_equal_ml_dtypes(self, fmt: FloatFormat) -> None:
        info = ml_dtypes.finfo(ML_DTYPE[fmt.name])
        limits = (info.max, info.smallest_normal, info.smallest_subnormal)
        assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == tuple(map(float, limits))
        assert fmt.bits == info.bits

    def test_equal_gfloat(self, fmt: FloatFormat) -> None:
        info = GFLOAT[fmt.name]
        assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (info.max, info.smallest_normal, info.smallest_subnormal)


class TestE2M1:
    """Apart, since it has no NaN."""

    def test_equals_ml_dtypes_and_gfloat(self, x: torch.Tensor) -> None:
        real = x[~x.isnan()]
        got = saturating_cast(real, E2M1)
        assert_same_bits(got, np.clip(real.numpy(), -6, 6).astype(ML_DTYPE["e2m1"]).astype(np.float32))
        want = gfloat.round_ndarray(GFLOAT["e2m1"], real.numpy().astype(np.float64), sat=True)
        assert_same_bits(got, want.astype(np.float32))

    def test_takes_nan_for_6_as_nvidia_does(self) -> None:
        assert saturating_cast(torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]), E2M1).tolist() == [6, 6, 6, -6]


def test_the_wider_formats_hold_their_own_values_unchanged() -> None:
    for fmt in (BF16, FP16):
        values = all_patterns(fmt.dtype)
        finite = values[values.isfinite()]
        assert torch.equal(saturating_cast(finite.float(), fmt), finite)

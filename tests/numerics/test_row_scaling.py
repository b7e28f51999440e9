"""A scale for each row, against a transcription of torchao's casts to numpy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import KINDS, random_patterns

from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.recipe import parse_recipe

TARGETS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROLES = ("input", "weight", "grad_output")


def reference(x: torch.Tensor, fmt: str, power_of_two: bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Scales [rows], and what stands for each value; `amax_to_scale` and `to_fp8_saturated` of torchao 0.18."""
    target, limit = TARGETS[fmt]
    values = x.detach().float().reshape(-1, x.shape[-1] if x.dim() else 1).numpy()
    amax = np.nan_to_num(np.abs(values), nan=0.0, posinf=np.inf).max(1, initial=0.0)
    scale = (limit / np.maximum(amax.astype(np.float64), 1e-12)).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale)))
    codes = np.clip(values * scale[:, None], -limit, limit).astype(target).astype(np.float64)
    return scale, codes / np.where(scale > 0, scale.astype(np.float64), np.inf)[:, None]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("fmt", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])
def test_scales_codes_and_sums_of_every_kind_of_tensor(kind: str, dtype: torch.dtype, fmt: str, power_of_two: bool) -> None:
    x = KINDS[kind](dtype)
    recipe = parse_recipe(f"rowwise-{fmt}(power_of_two={power_of_two})")
    with np.errstate(all="ignore"):
        scale, q = reference(x, fmt, power_of_two)
    values = x.detach().double().reshape(q.shape).numpy()
    finite = np.isfinite(values)
    made = recipe.scaling.quantize(x.detach(), "input", recipe.get_format("input"))
    np.testing.assert_array_equal(made.scales.scale.flatten().numpy(), scale)
    with np.errstate(all="ignore"):
        codes = np.where(scale[:, None] > 0, q * scale[:, None].astype(np.float64), 0.0)
    np.testing.assert_array_equal(made.codes.float().reshape(q.shape).numpy()[finite], codes.astype(np.float32)[finite])
    np.testing.assert_allclose(made.dequantize().reshape(q.shape).numpy()[finite], q[finite], rtol=1e-15)
    kept, stands = np.where(finite, values, 0.0), np.where(finite, q, 0.0)
    least = 1e-15 * (kept**2).sum()  # of a tensor whose values are codes but for the rounding of the scale
    for sums in (
        quantization_sums(x, recipe.scaling, "weight", recipe.get_format("input")),
        quantization_sums_in_blocks(x, recipe.scaling, "input", recipe.get_format("input"), chunk=64),
    ):
        assert int(sums.underflows) == int(((kept != 0) & (stands == 0)).sum())
        assert float(sums.sum_error2) == pytest.approx(((kept - stands) ** 2).sum(), rel=1e-12, abs=least)
        assert float(sums.sum_q2) == pytest.approx((stands**2).sum(), rel=1e-12, abs=0)
        assert float(sums.sum_xq) == pytest.approx((kept * stands).sum(), rel=1e-12, abs=0)


def test_nothing_overflows_and_a_loud_row_is_not_heard_in_another() -> None:
    x = torch.randn(64, 4096)
    x[7] *= 2.0**20
    of_rows = parse_recipe("rowwise(power_of_two=False)")
    sums = quantization_sums(x, of_rows.scaling, "input", of_rows.get_format("input"))
    assert int(sums.overflows) == 0 and int(sums.underflows) < 64
    assert float((sums.sum_error2 / x.double().square().sum()).sqrt()) < 0.03


def test_names() -> None:
    names = {
        "rowwise": "rowwise-e4m3",
        "rowwise-e4m3": "rowwise-e4m3",
        "rowwise-hybrid": "rowwise-hybrid",
        "rowwise(power_of_two=False)": "rowwise-e4m3(power_of_two=False)",
        "current-e4m3(epsilon=1e-12)": "current-e4m3(epsilon=1e-12)",
    }
    for given, name in names.items():
        assert parse_recipe(given).name == name == parse_recipe(name).name
    assert parse_recipe("rowwise").uses_block_scaling
    assert [parse_recipe("rowwise").get_format(role).name for role in ROLES] == ["e4m3"] * 3
    assert [parse_recipe("rowwise-hybrid").get_format(role).name for role in ROLES] == ["e4m3", "e4m3", "e5m2"]
    with pytest.raises(ConfigError, match="recipe 'rowwise' has no option 'epsilon'"):
        parse_recipe("rowwise(epsilon=1.0)")


def test_a_row_that_holds_infinity_is_lost_and_the_others_are_not() -> None:
    x = torch.ones(2, 8)
    x[0, 0] = torch.inf
    rule = parse_recipe("rowwise")
    sums = quantization_sums(x, rule.scaling, "input", rule.get_format("input"))
    assert int(sums.underflows) == 7 and float(sums.sum_q2) == 8


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 2500), (40, 1024), (2000, 1030), (1, 5000), (5, 4096)], ids=str)
def test_compiled_loops_are_the_plain_ones(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """Rows of any length and bits, NaN and infinity among them, and by several threads."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rare = torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 1e-4, torch.inf, normal)
    patterns = random_patterns(shape[0] * shape[1], dtype).view(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x in (normal, rare, patterns, normal[:, : shape[1] // 2], normal.t()):
            for name in ("rowwise", "rowwise-e5m2(power_of_two=False)"):
                recipe = parse_recipe(name)
                how = x, recipe.scaling, "input", recipe.get_format("input")
                fast, plain = quantization_sums(*how), quantization_sums_in_blocks(*how)
                for sums, want in vars(plain).items():
                    assert float(getattr(fast, sums)) == pytest.approx(float(want), rel=1e-12, abs=0), (name, sums)
    finally:
        torch.set_num_threads(before)

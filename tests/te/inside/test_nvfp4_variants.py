"""NVFP4 with 4-over-6 and with scales of rows: codes and scales against Transformer Engine's own reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.formats import E2M1
from nemo_fp8_debug.numerics.nvfp4_scaling import NVFP4Scaling
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def tensor(kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    dice = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=dice)
    if kind == "wide":
        x *= torch.randn(rows, columns, generator=dice).mul(6).exp()
    if kind == "ties":  # on and between codes
        x = torch.randint(-24, 25, (rows, columns), generator=dice) / 4
    if kind == "zeros":
        x[: rows // 2] = 0
        x[:, :16] = 0
    if kind == "tiny":
        x *= 1e-30
    return x.to(dtype)


def reference(x: torch.Tensor, rule: NVFP4Scaling, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of codes, and scales by value."""
    amax = x.float().abs().amax(1) if rule.row_scaled else x.float().abs().max().reshape(1)
    packed, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
        NVFP4QuantizerRef._pad_tensor(x, tile, 16),
        amax,
        16,
        tile,
        pow_2_scales=False,
        row_scaled_nvfp4=rule.row_scaled,
        nvfp4_use_4over6=bool(rule.four_over_six),
        nvfp4_e4m3_max=rule.largest_scale,
        nvfp4_4over6_err_mode=rule.four_over_six or "MAE",
        eps=0.0,
    )
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1)[: len(x), : x.shape[1]]
    return VALUES[codes.long()], scales[: len(x)].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)[:, : x.shape[1]]


RULES = [
    *(NVFP4Scaling(four_over_six=mode, largest_scale=most) for mode in ("MAE", "MSE") for most in (448, 256)),
    NVFP4Scaling(row_scaled=True),
    NVFP4Scaling(row_scaled=True, four_over_six="MAE", largest_scale=256),
]


@pytest.mark.parametrize(
    ("kind", "dtype"), itertools.product(["plain", "wide", "ties", "zeros", "tiny"], [torch.bfloat16, torch.float32])
)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: Recipe(rule).name)
@pytest.mark.parametrize("role", ["input", "weight"])
def test_codes_and_scales(rule: NVFP4Scaling, role: str, kind: str, dtype: torch.dtype) -> None:
    role = "input" if rule.row_scaled else role  # W has no scales of rows
    for shape in ((32, 64), (48, 160), (16, 16)):
        x = tensor(kind, *shape, dtype)
        made = rule.quantize(x, role, E2M1)
        high = made.block[0]
        codes, scales = reference(x, rule, high)
        stored = made.scales.stored.float().repeat_interleave(high, 0)[: len(x)].repeat_interleave(16, 1)[:, : x.shape[1]]
        assert torch.equal(made.codes.float(), codes)
        assert torch.equal(stored, scales)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: Recipe(rule).name)
def test_metrics_are_those_of_the_codes(rule: NVFP4Scaling) -> None:
    x = tensor("wide", 64, 256, torch.bfloat16)
    sums = quantization_sums(x, rule, "input", E2M1)
    stands_for = rule.quantize(x, "input", E2M1).dequantize()
    assert sums.sum_error2.item() == pytest.approx((x.double() - stands_for).square().sum().item(), rel=1e-12)
    assert sums.underflows.item() == ((stands_for == 0) & (x != 0)).sum().item()


def test_the_error_is_smaller_than_without() -> None:
    x = tensor("plain", 256, 256, torch.bfloat16)
    plain, chosen = (quantization_sums(x, rule, "input", E2M1).sum_error2.item() for rule in (NVFP4Scaling(), RULES[2]))
    assert chosen < 0.95 * plain


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4(four_over_six=MAX)",
        "nvfp4(largest_scale=256)",
        "nvfp4(four_over_six=MAE,largest_scale=300)",
        "nvfp4(stochastic=True,row_scaled=True)",
        "nvfp4_torchao(row_scaled=True)",
        "nvfp4_torchao(hadamard=plain)",
    ],
)
def test_what_no_engine_does_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_recipe(name)


def test_names_lead_back_to_rules() -> None:
    for rule in RULES:
        assert parse_recipe(Recipe(rule).name).scaling == rule

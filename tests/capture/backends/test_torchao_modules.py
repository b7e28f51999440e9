"""torchao's layers in runs of all kinds: autocast, recompute, MXFP8, and classes that are not known here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
from torchao_engine import Multiplied, casts_of_a_layer, configured, float8, multiplied, operands

from nemo_fp8_debug import ConfigError, Emulation, FP8DebugWarning, Monitor
from nemo_fp8_debug.capture.backends.base import UnknownCastError
from nemo_fp8_debug.capture.backends.torchao.casts import MXFP8_OPTIONS, find_cast
from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.recipe import parse_recipe

ROLES = ("input", "weight", "grad_output")


def sampled(model: nn.Module, step: Any, **options: Any) -> Samples:
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, **options)
    with monitor.step(0):
        step()
    monitor.close()
    return samples


def said(record: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in record if issubclass(warning.category, FP8DebugWarning)]


class Doubling(Float8Linear):
    """A user's own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * input)


def others() -> dict[str, nn.Module]:
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear
    from torchao.prototype.quantized_training.int8_mixed_precision import (
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinear,
    )
    from torchao.quantization.qat.linear import FakeQuantizedLinear, Int8DynActInt4WeightQATLinear

    mx = MXFakeQuantizeConfig()
    int8 = {"config": Int8MixedPrecisionTrainingConfig()}
    return {
        "torchao.quantization.qat.linear.FakeQuantizedLinear": FakeQuantizedLinear(32, 64),
        "torchao.quantization.qat.linear.Int8DynActInt4WeightQATLinear": Int8DynActInt4WeightQATLinear(32, 64, groupsize=32),
        "torchao.prototype.qat.mx.MXFakeQuantizedLinear": MXFakeQuantizedLinear(
            32, 64, activation_config=mx, weight_config=mx
        ),
        "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinear": (
            Int8MixedPrecisionTrainingLinear(32, 64, **int8)
        ),
        f"{Doubling.__module__}.Doubling": Doubling(32, 64, config=configured("tensorwise")),
    }


@pytest.mark.parametrize("name", others())
def test_other_subclasses_of_linear_are_unknown_and_their_class_is_named(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    module, x = others()[name], torch.randn(8, 32)
    samples = sampled(nn.Sequential(module), lambda: module(x).sum().backward())
    [warned] = said(recwarn)
    assert f"its module is a {name}, which is not supported" in warned
    rows = samples.rows(0)
    assert {(role, row["scale_source"], row["recipe"]) for (_, role), row in rows.items()} == {
        (role, "unknown", "current-hybrid") for role in ROLES
    }
    assert samples.fingerprint["recipe"]["fp8_engine"] == f"unknown: training with {name} is not supported"


def test_a_weight_that_is_stored_as_codes_is_left_out_and_its_class_named(recwarn: pytest.WarningsRecorder) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(32, 64))
    quantize_(model, int8_weight_only_quantized_training())
    x = torch.randn(8, 32)
    samples = sampled(model, lambda: model(x).sum().backward())
    assert {(role, row["scale_source"]) for (_, role), row in samples.rows(0).items()} == {
        ("input", "unknown"),
        ("grad_output", "unknown"),
    }
    warned = " ".join(said(recwarn))
    assert "it is stored as a torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight" in warned
    engine = samples.fingerprint["recipe"]["fp8_engine"]
    assert engine.startswith("unknown: training with torch.nn.modules.linear.Linear with weights of torchao.prototype.")


@pytest.fixture
def autocast_of_gpus() -> Iterator[None]:
    """`Float8Linear` asks for it on any device; torch's context refuses to begin without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


@pytest.mark.usefixtures("autocast_of_gpus")
def test_under_autocast_x_is_what_float8linear_makes_of_it() -> None:
    given = operands(33, 64, 48, torch.float32)
    model = float8(nn.Sequential(nn.Linear(64, 48)), configured("rowwise"))
    with torch.no_grad():
        model[0].weight.copy_(given["weight"])

    def step() -> None:
        with multiplied() as seen:
            model(given["input"]).backward(given["grad_output"].bfloat16())
        of_step.append(seen)

    of_step: list[Multiplied] = []
    rows = sampled(model, step, on_error="raise").rows(0)
    theirs = casts_of_a_layer(of_step[0])
    assert [rows["0", role]["dtype"] for role in ROLES[:2]] == ["bfloat16", "float32"]
    x = given["input"].bfloat16().double()
    want = (x - theirs["fprop", "input"].values).square().mean()
    assert rows["0", "input"]["mse"] == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_counted_once_with_their_casts(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = float8(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)).bfloat16(), configured("rowwise_with_gw_hp"))
    x = torch.randn(8, 32).bfloat16().requires_grad_()
    plain = sampled(model, lambda: model(x).sum().backward(), on_error="raise")
    again = sampled(model, lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward(), on_error="raise")
    for key, row in plain.rows(0).items():
        assert row["calls"] == 1
        assert {k: v for k, v in again.rows(0)[key].items() if k != "nonfinite_order"} == {
            k: v for k, v in row.items() if k != "nonfinite_order"
        }
        assert (row["scale_source"], row["recipe"]) == ("engine", "rowwise-e4m3")


def test_emulation_is_refused() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 64)), configured("tensorwise"))
    with pytest.raises(ConfigError, match="0 is a module of torchao, which does its own quantization"):
        Emulation(model, "current")


def mxfp8(wgrad_with_hp: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"kernel_preference": KernelPreference.EMULATED} | options
    return nn.Sequential(MXFP8Linear(96, 64, wgrad_with_hp=wgrad_with_hp, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("wgrad_with_hp", [True, False])
def test_mxfp8_in_its_emulation_is_measured_by_the_codes_that_torchao_multiplies(wgrad_with_hp: bool) -> None:
    model, given = mxfp8(wgrad_with_hp), operands(64, 96, 64, torch.bfloat16)
    given["input"][5] *= 1e-37  # lost: torchao does not scale blocks as small as that
    with torch.no_grad():
        model[0].weight.copy_(given["weight"])
    of_step: list[Multiplied] = []

    def step() -> None:
        with multiplied() as seen:
            model(given["input"]).backward(given["grad_output"])
        of_step.append(seen)

    samples = sampled(model, step, on_error="raise", output_rows=1000)
    (x, w), (dy, _), _ = of_step[0].pairs
    for role, theirs in (("input", x), ("weight", w.t()), ("grad_output", dy)):
        assert isinstance(theirs, MXTensor)
        use = find_cast(model[0], role)
        ours = use.scale.quantize(given[role], role, use.format)
        assert torch.equal(ours.scales.stored.flatten(), theirs.scale.view(torch.uint8).flatten())
        assert torch.equal(ours.codes.view(torch.uint8), theirs.qdata.view(torch.uint8))
        row = samples.rows(0)["0", role]
        assert (row["recipe"], row["scale_source"]) == ("mxfp8-e4m3(by_logarithm=True)", "engine")
        scale = torch.exp2(theirs.scale.view(torch.uint8).double() - 127).repeat_interleave(32, -1)
        values = theirs.qdata.double() * scale.view(theirs.qdata.shape)
        assert row["mse"] == pytest.approx(float((given[role].double() - values).square().mean()), rel=1e-12)
        assert row["underflow_pct"] == 100 * float(((given[role] != 0) & (values == 0)).double().mean())
    assert set(samples.samples[0].get_table("outputs")["product"]) == {"fprop", "dgrad"} | (
        set() if wgrad_with_hp else {"wgrad"}
    )


@pytest.mark.parametrize(
    "options",
    [{"kernel_preference": KernelPreference.AUTO}, {"scale_calculation_mode": ScaleCalculationMode.FLOOR}],
    ids=str,
)
def test_mxfp8_by_kernels_or_in_another_mode_is_unknown(options: Any) -> None:
    for role in ROLES:
        with pytest.raises(UnknownCastError, match=f"unsupported value {next(iter(options))}="):
            find_cast(mxfp8(**options)[0], role)


def test_every_option_of_the_mxfp8_linear_that_is_installed_is_in_a_list() -> None:
    plain = vars(nn.Linear(32, 32))
    assert vars(MXFP8Linear(32, 32)).keys() - plain.keys() == MXFP8_OPTIONS


@pytest.mark.parametrize("power", [-130, -100, 0])
def test_kernels_take_the_mxfp8_of_torchao(power: int) -> None:
    """The compiled loops against the plain ones, where blocks are lost too."""
    rule = parse_recipe("mxfp8-e4m3(by_logarithm=True)").scaling
    x = (torch.randn(64, 96) * torch.exp2(torch.randint(power, power + 20, (64, 1)).float())).bfloat16()
    fast, plain = quantization_sums(x, rule, "input", E4M3), quantization_sums_in_blocks(x, rule, "input", E4M3)
    for name, want in vars(plain).items():
        assert float(getattr(fast, name)) == pytest.approx(float(want), rel=1e-12), name


def test_a_copy_of_a_model_is_measured_as_the_model() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 64)), configured("rowwise"))
    twin = copy.deepcopy(model)
    assert find_cast(twin[0], "grad_output") == find_cast(model[0], "grad_output")

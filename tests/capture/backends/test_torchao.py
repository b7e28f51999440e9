"""The record of torchao's layers against the codes and scales that torchao itself multiplied."""

from __future__ import annotations

import enum
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn

pytest.importorskip("torchao", reason="it is not among the packages that are locked")
from torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_utils import amax_to_scale
from torchao_engine import Cast, casts_of_a_layer, configured, float8, multiplied, operands

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.capture.backends.base import UnknownCast
from nemo_fp8_debug.capture.backends.torchao import casts
from nemo_fp8_debug.capture.backends.torchao.casts import CASTS, KNOWN, cast_of
from nemo_fp8_debug.numerics.block_scaling import BlockRule
from nemo_fp8_debug.numerics.formats import E4M3, E5M2, saturating_cast
from nemo_fp8_debug.numerics.row_scaling import RowwiseScaling
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling, amax_of

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((5, 16, 32), (33, 100, 48), (64, 300, 7))
#: the product whose cast a row has
OWN = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}


def config_of(name: str) -> Float8LinearConfig:
    if name in RECIPES:
        return configured(name)
    rowwise = ScalingGranularity.AXISWISE
    return {
        "tensorwise, powers of two": Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True),
        "rowwise, any scale, hybrid": Float8LinearConfig(
            cast_config_input=CastConfig(scaling_granularity=rowwise),
            cast_config_weight=CastConfig(scaling_granularity=rowwise),
            cast_config_grad_output=CastConfig(scaling_granularity=rowwise),
            emulate=True,
        ),
        "forward in high precision": Float8LinearConfig(
            cast_config_input=CastConfig(ScalingType.DISABLED),
            cast_config_weight=CastConfig(ScalingType.DISABLED),
            cast_config_input_for_grad_weight=CastConfig(),
            cast_config_weight_for_grad_input=CastConfig(),
            emulate=True,
        ),
    }[name]


ALL = (*RECIPES, "tensorwise, powers of two", "rowwise, any scale, hybrid", "forward in high precision")


def layer_of(name: str, given: dict[str, torch.Tensor], bias: bool = True) -> nn.Module:
    outputs, columns = given["weight"].shape
    layer = nn.Linear(columns, outputs, bias=bias, dtype=given["weight"].dtype)
    with torch.no_grad():
        layer.weight.copy_(given["weight"])
    model = float8(nn.Sequential(layer), config_of(name))
    assert type(model[0]).__name__ == "Float8Linear"
    return model


def run(model: nn.Module, given: dict[str, torch.Tensor], **options: Any) -> tuple[Samples, dict[tuple[str, str], Cast]]:
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, **({"on_error": "raise"} | options))
    with monitor.step(0), multiplied() as seen:
        model(given["input"]).backward(given["grad_output"])
    monitor.close()
    return samples, casts_of_a_layer(seen)


def recast(x: torch.Tensor, use: Any, role: str, turn: bool) -> Cast:
    """By the rule that the backend has read, along the rows or the columns of an operand."""
    m = x.t() if turn else x
    if isinstance(use.scale, BlockRule):
        found = use.scale.quantize(m, role, use.format)
        codes, scale = found.codes, found.scales.scale
    else:
        scale = use.scale.scale(amax_of(m), use.format.max)
        codes = saturating_cast(m.float() * scale, use.format)
    return Cast(codes.t(), scale.t() if scale.dim() else scale) if turn else Cast(codes, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_codes_and_scales_of_every_product_are_torchaos(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    given = operands(*shape, dtype)
    model = layer_of(name, given)
    with multiplied() as seen:
        model(given["input"].requires_grad_()).backward(given["grad_output"])
    theirs = casts_of_a_layer(seen)
    for role, products in CASTS.items():
        use = cast_of(model[0], role)
        assert use.source == ("engine" if (OWN[role], role) in theirs else "not quantized")
        for product in products:
            cast = use.in_product(product)
            assert (cast is not None) == ((product, role) in theirs)
            if cast is not None:
                turn = (product, role) in (("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))
                ours, want = recast(given[role].detach(), cast, role, turn), theirs[product, role]
                assert torch.equal(ours.codes.view(torch.uint8), want.codes.view(torch.uint8)), (product, role)
                assert torch.equal(ours.scale.expand_as(ours.codes), want.scale.expand_as(want.codes)), (product, role)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_metrics_are_those_of_what_torchao_multiplied(name: str, dtype: torch.dtype) -> None:
    given = operands(33, 100, 48, dtype)
    samples, theirs = run(layer_of(name, given), given)
    rows = samples.rows(0)
    assert len(rows) == 3
    for (_, role), row in rows.items():
        cast = theirs.get((OWN[role], role))
        if cast is None:
            assert (row["scale_source"], row["recipe"]) == ("not quantized", "current-hybrid")
            continue
        x = given[role].double()
        assert row["scale_source"] == "engine"
        assert row["format"] == {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[cast.codes.dtype]
        assert row["underflow_pct"] == 100 * int(((x != 0) & (cast.values == 0)).sum()) / x.numel()
        want = {
            "mse": (x - cast.values).square().mean(),
            "relative_error": ((x - cast.values).square().sum() / x.square().sum()).sqrt(),
            "cosine": (x * cast.values).sum() / (x.square().sum() * cast.values.square().sum()).sqrt(),
        }
        for metric, value in want.items():
            assert row[metric] == pytest.approx(float(value), rel=1e-12), (role, metric)
        if cast.scale.dim():
            assert row["recipe"].startswith("rowwise-") and row["scale"] is None
        else:
            assert row["recipe"].startswith("current-") and row["scale"] == float(cast.scale)


@pytest.mark.parametrize("name", ALL)
def test_errors_of_outputs_are_those_of_torchaos_products(name: str) -> None:
    """The whole of each output, from the codes that torchao multiplied; none of a product in high precision."""
    given = operands(33, 100, 48, torch.bfloat16)
    samples, theirs = run(layer_of(name, given), given, output_rows=1000)
    outputs = samples.samples[0].outputs
    found = dict(zip(outputs["product"], outputs["relative_error"], strict=True))
    x, w, dy = (given[role].double() for role in ("input", "weight", "grad_output"))
    exact = {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}
    values = {key: cast.values for key, cast in theirs.items()}
    assert set(found) == {product for product, _ in theirs}
    for product, error in found.items():
        first, second = (values[key] for key in theirs if key[0] == product)
        made = {"fprop": lambda a, b: a @ b.t(), "dgrad": lambda a, b: a @ b, "wgrad": lambda a, b: a.t() @ b}[product]
        want = (made(first, second) - exact[product]).norm() / exact[product].norm()
        assert error == pytest.approx(float(want), rel=1e-6)


def test_one_loud_token_underflows_by_tensor_and_not_by_row() -> None:
    """Finding: rowwise scaling was measured as current scaling, with 81% of X underflowing."""
    torch.manual_seed(0)
    x = torch.randn(64, 256).bfloat16()
    x[0] *= 2.0**18
    given = {"input": x, "weight": torch.randn(64, 256).bfloat16(), "grad_output": torch.randn(64, 64).bfloat16()}
    by_row, _ = run(layer_of("rowwise", given), given)
    by_tensor, _ = run(layer_of("tensorwise", given), given)
    assert by_row.rows(0)["0", "input"]["underflow_pct"] < 1
    assert by_tensor.rows(0)["0", "input"]["underflow_pct"] > 50
    assert by_row.rows(0)["0", "grad_output"]["format"] == "e4m3"
    assert by_tensor.rows(0)["0", "grad_output"]["format"] == "e5m2"


def trained(name: str, monitored: bool) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = float8(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16), nn.Linear(16, 16)).bfloat16(), config_of(name)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, recorders=[Samples()], interval=2, output_rows=8, on_error="raise") if monitored else None
    losses = []
    for step in range(5):
        if monitor:
            monitor.begin_step(step)
        for _ in range(2):
            loss = model(torch.randn(24, 32).bfloat16()).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.end_step()
    if monitor:
        monitor.close()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_weights_are_bit_identical_with_the_monitor(name: str) -> None:
    (losses, weights), (alone, untouched) = trained(name, True), trained(name, False)
    assert losses == alone
    assert all(map(torch.equal, weights, untouched))


def test_every_field_of_the_release_that_is_installed_is_in_a_list() -> None:
    from dataclasses import fields

    from torchao.float8 import config

    for name, known in KNOWN.items():
        assert {field.name for field in fields(getattr(config, name))} == known
    assert {kind.name for kind in config.ScalingType} == {"DYNAMIC", "DISABLED"}
    assert {kind.name for kind in config.ScalingGranularity} == {"TENSORWISE", "AXISWISE"}


def test_the_fingerprint_names_torchao() -> None:
    given = operands(5, 16, 32, torch.bfloat16)
    samples, _ = run(layer_of("rowwise", given), given)
    assert samples.fingerprint["recipe"]["fp8_engine"] == "torchao"
    assert samples.fingerprint["versions"]["torchao"].startswith("0.")
    assert samples.fingerprint["sampled"]["backends"] == ["torchao"]


def test_casts_are_read_from_the_configuration_of_each_call() -> None:
    """It may be changed while the run goes on."""
    given = operands(5, 16, 32, torch.bfloat16)
    model, samples = layer_of("tensorwise", given), Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    for step, name in enumerate(("tensorwise", "rowwise")):
        model[0].config = config_of(name)
        with monitor.step(step):
            model(given["input"]).backward(given["grad_output"])
    monitor.close()
    recipes = [[samples.rows(step)["0", role]["recipe"] for role in CASTS] for step in (0, 1)]
    assert recipes == [["current-hybrid(epsilon=1e-12)"] * 3, ["rowwise-e4m3"] * 3]
    assert casts.release().startswith("torchao 0.")


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rounds", [True, False])
def test_scales_of_amaxes_next_to_powers_of_two_and_to_nothing_are_torchaos(rounds: bool, target: torch.dtype) -> None:
    """Its logarithm rounds up to the power of two above; an amax below 1e-12 counts as that."""
    power = 1.75 * torch.exp2(torch.arange(-60.0, 100))
    beside = [torch.nextafter(power, torch.tensor(torch.inf)), torch.nextafter(power, torch.tensor(0.0))]
    small = torch.nextafter(torch.tensor(1e-12), torch.tensor([0.0, 1.0]))
    amax = torch.cat([power, *beside, small, torch.tensor([0.0, 1e-12, 1e-40, 3e38]), torch.rand(1000)])
    want = amax_to_scale(amax, target, rounds)
    fmt = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}[target]
    limits = torch.full_like(amax, fmt.max)  # of several tensors at once, as metrics are computed
    for scale in (fmt.max, limits):
        assert torch.equal(CurrentScaling(1e-12, rounds, rounds).scale(amax, scale), want)
    assert torch.equal(RowwiseScaling(rounds).scales(amax[:, None], amax[0], fmt, torch.float32).scale[:, 0], want)
    by_bits = CurrentScaling(1e-12, rounds).scale(amax, fmt.max)
    assert torch.equal(by_bits, want) != rounds  # so the logarithm is needed


def said(record: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in record if issubclass(warning.category, FP8DebugWarning)]


def changed(config: Float8LinearConfig, **fields: Any) -> Float8LinearConfig:
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


class Later(enum.Enum):
    """What a later release may have."""

    BLOCKWISE = "blockwise"


UNKNOWN = {
    "a field": (lambda c: changed(c, amax_history_len=16), "its Float8LinearConfig has a field 'amax_history_len'"),
    "a field of a cast": (
        lambda c: changed(c, cast_config_input=changed(CastConfig(target_dtype=torch.float8_e4m3fn), static_scale=1.0)),
        "its CastConfig has a field 'static_scale'",
    ),
    "a field of a GEMM": (
        lambda c: changed(c, gemm_config_grad_input=changed(Float8GemmConfig(), fp8_output=True)),
        "its Float8GemmConfig has a field 'fp8_output'",
    ),
    "a class of a cast": (
        lambda c: changed(c, cast_config_grad_output_for_grad_weight=SimpleNamespace()),
        "its cast_config_grad_output_for_grad_weight is a types.SimpleNamespace",
    ),
    "a granularity": (
        lambda c: changed(c, cast_config_weight=changed(CastConfig(), scaling_granularity=Later.BLOCKWISE)),
        "cast_config_weight.scaling_granularity=Later.BLOCKWISE",
    ),
    "a format": (
        lambda c: changed(c, cast_config_input=changed(CastConfig(), target_dtype=torch.float8_e4m3fnuz)),
        "cast_config_input.target_dtype=torch.float8_e4m3fnuz of its Float8LinearConfig",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_of_a_configuration_is_named_once_and_labeled_unknown(case: str) -> None:
    change, named = UNKNOWN[case]
    module = layer_of("rowwise", operands(5, 16, 32, torch.bfloat16))[0]
    module.config = change(configured("rowwise"))
    with pytest.raises(UnknownCast, match=re.escape(named) + ".* not known here"):
        for role in CASTS:
            cast_of(module, role)


def test_a_run_with_an_unknown_field_warns_once_and_is_labeled_unknown(recwarn: pytest.WarningsRecorder) -> None:
    given = operands(5, 16, 32, torch.bfloat16)
    model = nn.Sequential(*(layer_of("rowwise", given | {"weight": torch.randn(16, 16).bfloat16()})[0] for _ in range(3)))
    for module in model:
        module.config = changed(configured("rowwise"), tile=(128, 128))
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, output_rows=4)
    for step in range(3):
        with monitor.step(step):
            model(given["input"]).sum().backward()
    monitor.close()
    [warned] = said(recwarn)
    assert "Float8LinearConfig has a field 'tile', which is not known here" in warned and "'unknown'" in warned
    rows = samples.rows(2)
    assert len(rows) == 9
    assert {(row["scale_source"], row["recipe"]) for row in rows.values()} == {("unknown", "current-hybrid")}


def test_a_release_that_casts_otherwise_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration may be the same; torchao's epsilon stands for its arithmetic."""
    from nemo_fp8_debug.capture.backends.torchao.trial import differs

    module = layer_of("tensorwise", operands(5, 16, 32, torch.bfloat16))[0]
    monkeypatch.setattr("torchao.float8.float8_utils.EPS", 1.0)
    differs.cache_clear()
    with pytest.raises(UnknownCast, match=r"this release of torchao casts otherwise .*scales of CurrentScaling"):
        cast_of(module, "input")
    differs.cache_clear()
    monkeypatch.undo()
    assert cast_of(module, "input").source == "engine"

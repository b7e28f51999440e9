"""The record of torchao's layers against the codes and scales that torchao itself multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from torchao.float8.float8_utils import amax_to_scale
from torchao_engine import RECIPES, Cast, casts_of_a_layer, config_of, float8, layer_of, multiplied, operands

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.backends.torchao import casts
from nemo_fp8_debug.capture.backends.torchao.casts import CASTS, KNOWN, find_cast
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, RowwiseScaling
from nemo_fp8_debug.numerics.formats import E4M3, E5M2, saturating_cast
from nemo_fp8_debug.numerics.metrics import compute_amax
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((5, 16, 32), (33, 100, 48), (64, 300, 7))
#: the product whose cast a row has
OWN = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}


ALL = (*RECIPES, "tensorwise, powers of two", "rowwise, any scale, hybrid", "forward in high precision")


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
    if isinstance(use.scale, BlockScalingRule):
        found = use.scale.quantize(m, role, use.format)
        codes, scale = found.codes, found.scales.scale
    else:
        scale = use.scale.compute_scale(compute_amax(m), use.format.max)
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
        use = find_cast(model[0], role)
        assert use.source == ("engine" if (OWN[role], role) in theirs else "not quantized")
        for product in products:
            cast = use.select_product_cast(product)
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
    outputs = samples.samples[0].get_table("outputs")
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
    assert casts.name_release().startswith("torchao 0.")


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
        assert torch.equal(CurrentScaling(1e-12, rounds, rounds).compute_scale(amax, scale), want)
    assert torch.equal(RowwiseScaling(rounds).compute_scales(amax[:, None], amax[0], fmt, torch.float32).scale[:, 0], want)
    by_bits = CurrentScaling(1e-12, rounds).compute_scale(amax, fmt.max)
    assert torch.equal(by_bits, want) != rounds  # so the logarithm is needed

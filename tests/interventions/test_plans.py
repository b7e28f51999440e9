"""A plan in FP8 emulation: each operand under its own recipe, and reported under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Samples
from test_emulate import fake_quantized, own_scale
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.plan.plan import Change, Plan

MIXED = Plan(
    (
        Change("0", "bf16"),
        Change("1", "delayed-e4m3(margin=2,amax_history_len=3)", ("input", "grad_output")),
        Change("1", "current-e5m2", ("weight",)),
        Change("2", "blockwise", ("input",)),
        Change("2", "bf16", ("weight",)),
    )
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))).bfloat16()


def emulation_of(linears: nn.Module, plan: Plan = MIXED, recipe: str = "delayed(amax_history_len=2)") -> Emulation:
    emulation = Emulation.from_gemms(find_gemms([linears]), parse_recipe(recipe), plan)
    emulation.attach()
    return emulation


def train(linears: nn.Module, emulation: Emulation, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16() * (1 + step)
        linears.zero_grad()
        loss = linears(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in linears.parameters():
                parameter -= 1e-3 * parameter.grad
        emulation.end_step()
        losses.append(loss.item())
    return losses


def test_operands_under_bf16_are_the_very_same() -> None:
    linear, plan = nn.Linear(8, 8), Plan((Change("model", "bf16"),))
    expected_x, expected_y = torch.randn(2, 8, requires_grad=True), None
    expected_y = linear(expected_x)
    expected_y.sum().backward()
    gradients = [expected_x.grad, linear.weight.grad]
    x, linear.weight.grad = expected_x.detach().clone().requires_grad_(), None
    emulation_of(linear, plan, "current")
    y = linear(x)
    y.sum().backward()
    assert torch.equal(y, expected_y)
    assert all(torch.equal(a, b) for a, b in zip([x.grad, linear.weight.grad], gradients, strict=True))


def test_one_operand_in_bf16_leaves_the_others_in_fp8() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    emulation_of(linear, Plan((Change("model", "bf16", ("weight",)),)), "current")
    assert torch.equal(linear(x), fake_quantized(x, own_scale(x, "e4m3"), "e4m3") @ linear.weight.T)


def test_each_operand_has_scales_of_its_own_recipe() -> None:
    linears = model()
    emulation = emulation_of(linears)
    lengths = {recipe.scaling.margin: state.history.shape for recipe, state in emulation.states.items()}
    # dY of layer 2 and all of layer 3 follow the run's recipe.
    assert lengths == {2: (3, 2), 0: (2, 4)}
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden = nn.functional.linear(x, linears[0].weight)
    train(linears, emulation, range(1))
    (mine,) = (state for recipe, state in emulation.states.items() if recipe.scaling.margin == 2)
    assert mine.scale[0].item() == pytest.approx(448 / 4 / hidden.abs().max().item())


def test_the_monitor_reports_each_operand_as_it_is_cast() -> None:
    linears, samples = model(), Samples()
    emulation = emulation_of(linears)
    monitor = Monitor(linears, recorders=[samples], interval=1, on_error="raise")
    for step in range(3):
        with monitor.step(step):
            train(linears, emulation, range(step, step + 1))
    rows = samples.rows(2)
    found = {key: (row["scale_source"], row["recipe"], row["format"]) for key, row in rows.items()}
    plain = ("not quantized", "current-hybrid")
    own, margin = "delayed-hybrid(amax_history_len=2)", "delayed-e4m3(margin=2,amax_history_len=3)"
    assert found == {
        ("0", "input"): (*plain, "e4m3"),
        ("0", "weight"): (*plain, "e4m3"),
        ("0", "grad_output"): (*plain, "e5m2"),
        ("1", "input"): ("engine", margin, "e4m3"),
        ("1", "weight"): ("engine", "current-e5m2", "e5m2"),
        ("1", "grad_output"): ("engine", margin, "e4m3"),
        ("2", "input"): ("engine", "blockwise-e4m3", "e4m3"),
        ("2", "weight"): (*plain, "e4m3"),
        ("2", "grad_output"): ("engine", own, "e5m2"),
        ("3", "input"): ("engine", own, "e4m3"),
        ("3", "weight"): ("engine", own, "e4m3"),
        ("3", "grad_output"): ("engine", own, "e5m2"),
    }
    assert samples.fingerprint["recipe"]["gemms_quantized_by_emulation"] == 3
    assert samples.fingerprint["recipe"]["measured_against"] == own


def test_blocks_are_cast_as_block_rules_do() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 4, bias=False), torch.randn(3, 256) * torch.logspace(-6, 6, 256)
    emulation_of(linear, Plan((Change("model", "mxfp8", ("input",)), Change("model", "bf16", ("weight", "grad_output")))))
    scaled = x.view(3, 8, 32)
    power = torch.exp2(torch.ceil(torch.log2(scaled.abs().amax(-1, keepdim=True).double() / 448)))
    expected = ((scaled.double() / power).float().to(torch.float8_e4m3fn).double() * power).float().view(3, 256)
    assert torch.equal(linear(x), expected @ linear.weight.T)
    assert torch.isfinite(linear(torch.empty(0, 256))).all()


@pytest.mark.parametrize("plan", [MIXED, Plan()], ids=["plan", "none"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(plan: Plan) -> None:
    linears = model()
    emulation = emulation_of(linears, plan)
    train(linears, emulation, range(3))
    weights, saved = {k: v.clone() for k, v in linears.state_dict().items()}, emulation.state_dict()
    expected = train(linears, emulation, range(3, 6))

    resumed = model()
    resumed.load_state_dict(weights)
    again = emulation_of(resumed, plan)
    again.load_state_dict(saved)
    assert train(resumed, again, range(3, 6)) == expected


def test_a_plan_takes_over_the_amaxes_of_a_run_without_one() -> None:
    linears = model()
    without = emulation_of(linears, Plan())
    train(linears, without, range(3))
    (state,) = without.states.values()
    old: Any = {name: value for name, value in state.state_dict().items() if name != "recipe"}  # as before there were plans
    for saved in (without.state_dict(), old):
        emulation = Emulation.from_gemms(find_gemms([linears]), parse_recipe("delayed(amax_history_len=2)"), MIXED)
        emulation.load_state_dict(saved)
        for recipe, mine in emulation.states.items():
            for i, column in enumerate(mine.columns):
                amaxes = state.history[:, state.index[column]]
                limit = 448 if recipe.get_format(column[1]).name == "e4m3" else 57344
                assert mine.history[-2:, i].tolist() == amaxes.tolist()
                assert mine.scale[i].item() == pytest.approx(limit / 2**recipe.scaling.margin / amaxes.max().item())

"""FP8 emulation: bit-exact operands, real histories, and a monitor that reads the scales really used."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import Samples
from small_models.megatron import gpt, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms
from nemo_fp8_debug.interventions.emulate import EmulatedGemm, Emulation
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe
from nemo_fp8_debug.plan.plan import PLAN, Change, Plan

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def fake_quantized(x: torch.Tensor, scale: float, fmt: str) -> torch.Tensor:
    """The values an FP8 GEMM would multiply, by ml_dtypes and numpy float32 alone."""
    scale32 = np.float32(scale)
    scaled = x.detach().float().numpy() * scale32
    codes = np.clip(scaled, -MAX[fmt], MAX[fmt]).astype(NUMPY[fmt])
    return torch.from_numpy(codes.astype(np.float32) * (np.float32(1) / scale32)).to(x.dtype)


def own_scale(x: torch.Tensor, fmt: str) -> float:
    return float(np.float32(MAX[fmt]) / np.float32(x.detach().abs().max().item()))


def attached(model: nn.Module, recipe: str | dict[str, Any], layers: list[str] | None = None) -> Emulation:
    emulation = Emulation.from_gemms(require_matching_gemms(find_gemms([model]), layers), parse_recipe(recipe))
    emulation.attach()
    return emulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", ["e5m2", "e4m3"])
def test_output_and_gradients_are_those_of_quantized_operands(dtype: torch.dtype, backward: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 12).to(dtype)
    x, dy = torch.randn(7, 24).to(dtype).requires_grad_(), (1e-4 * torch.randn(7, 12)).to(dtype)
    attached(linear, {"name": "current", "fp8_format": "hybrid" if backward == "e5m2" else "e4m3"})
    y = linear(x)
    y.backward(dy)

    qx = fake_quantized(x, own_scale(x, "e4m3"), "e4m3")
    qw = fake_quantized(linear.weight, own_scale(linear.weight, "e4m3"), "e4m3")
    qdy = fake_quantized(dy, own_scale(dy, backward), backward)
    reference = nn.Linear(24, 12).to(dtype)
    reference.weight.data, reference.bias.data = qw, linear.bias.data
    qx.requires_grad_()
    expected = reference(qx)
    expected.backward(qdy)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, qx.grad)
    assert torch.equal(linear.weight.grad, reference.weight.grad)


def test_delayed_scales_follow_the_history() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8).bfloat16()
    emulation = attached(linear, {"name": "delayed", "amax_history_len": 2, "margin": 1})
    (state,) = emulation.states.values()
    amaxes: list[float] = []
    for step in range(6):
        x = (torch.randn(4, 8) * 2.0 ** (step % 3)).bfloat16()
        expected = 1.0 if not amaxes else 448 * 0.5 / max(amaxes[-2:])
        assert state.scale[0].item() == pytest.approx(expected, rel=1e-7)
        qx, qw = (fake_quantized(t, state.scale[i].item(), "e4m3") for i, t in enumerate((x, linear.weight)))
        y = linear(x)
        assert torch.equal(y, torch.nn.functional.linear(qx, qw, linear.bias))
        y.sum().backward()
        emulation.end_step()
        amaxes.append(x.abs().max().item())


def test_evaluation_leaves_the_history_alone() -> None:
    linear = nn.Linear(8, 8)
    emulation = attached(linear, "delayed")
    with torch.no_grad():
        linear(1000 * torch.ones(2, 8))
    emulation.end_step()
    (state,) = emulation.states.values()
    assert state.scale.tolist() == [1.0, 1.0, 1.0]


def test_detach_restores_the_model() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    before, own = model(x), dict(model.named_parameters())
    emulation = attached(model, "current")
    assert not torch.equal(model(x), before)
    emulation.detach()
    assert torch.equal(model(x), before)
    assert all(own[name] is p for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_weight_comes_back_when_a_forward_fails() -> None:
    linear = nn.Linear(8, 8)
    weight = linear.weight
    attached(linear, "current")
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.randn(2, 9))
    assert linear.weight is weight


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_gives_the_same_gradients(reentrant: bool) -> None:
    def gradients(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
        emulation = attached(model, {"name": "delayed", "amax_history_len": 4})
        for step in range(3):
            x = (torch.randn(4, 8) * (1 + step)).bfloat16().requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            y.float().square().sum().backward()
            emulation.end_step()
        (state,) = emulation.states.values()
        return [p.grad for p in model.parameters()] + [state.scale, state.history]

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, recomputed)


def test_fused_gradient_accumulation_is_refused() -> None:
    linear = nn.Linear(2, 2)
    linear.gradient_accumulation_fusion = True
    with pytest.raises(ConfigError, match="set gradient_accumulation_fusion=False"):
        Emulation.from_gemms(find_gemms([linear]), parse_recipe("delayed"))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("recipe", [{"name": "delayed", "amax_history_len": 2}, "current"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_monitor_reports_the_scales_really_used(recipe: str | dict[str, Any], recompute: bool) -> None:
    """Every cast of three steps of a real Megatron GPT, against the rows that the monitor recorded for them."""
    options = {"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}
    model = gpt(**(options if recompute else {}))
    emulation = attached(model, recipe, ["layers.*"])
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    casts: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    original = EmulatedGemm.quantize

    def watched(self: EmulatedGemm, role: str, x: torch.Tensor) -> torch.Tensor:
        result = original(self, role, x)
        casts.setdefault((self.gemm.name, role), []).append((x.detach().clone(), result.clone()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGemm, "quantize", watched)
        for step in range(3):
            casts.clear()
            with monitor.step(step):
                loss_of(model, step).backward()
            emulation.end_step()
            rows = samples.rows(step)
            assert len(casts) == 24
            for key, seen in casts.items():
                x, cast = seen[0]
                assert rows[key]["scale_source"] == "engine"
                assert torch.equal(fake_quantized(x, rows[key]["scale"], rows[key]["format"]), cast)
                assert rows[key]["amax"] == x.abs().max().item()
            assert rows["output_layer", "input"]["scale_source"] != "engine"


def test_names_of_recipes_reach_the_fingerprint() -> None:
    model = nn.Linear(4, 4)
    attached(model, {"name": "delayed", "fp8_format": "e4m3"})
    samples = Samples()
    Monitor(model, recorders=[samples], interval=1)
    recipe = samples.fingerprint["recipe"]
    assert recipe["measured_against"] == Recipe(parse_recipe("delayed").scaling, "e4m3").name
    assert recipe["fp8_engine"] == "emulation"


#: what each option of a recipe is set to, with those that it needs
OPTIONS = {
    "delayed": ("margin=1", "amax_history_len=1", "amax_compute_algo=most_recent"),
    "current": ("epsilon=64.0", "power_of_two=True", "by_logarithm=True,power_of_two=True"),
    "rowwise": ("power_of_two=False",),
    "blockwise": ("power_of_two=False", "epsilon=64.0", "dimensions=1", "dimensions=2"),
    "mxfp8": ("square_weights=True", "by_logarithm=True"),
    "nvfp4": (
        *("square_weights=False", "row_scaled=True", "four_over_six=MAE", "largest_scale=256,four_over_six=MAE"),
        *("stochastic=True", "hadamard=plain", "hadamard=signs"),
    ),
    "nvfp4_torchao": ("square_weights=False",),
    "bf16": (),
}
NOT_EMULATED = {"stochastic=True", "hadamard=plain", "hadamard=signs"}


def trained_under(recipe: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(160, 160, bias=False)
    rows = 2.0 ** (torch.arange(160) % 7)[:, None]
    linear.weight.data.mul_(rows)
    emulation, found = attached(linear, recipe), []
    for step in range(4):
        x = torch.randn(160, 160).clamp(-4, 4) / rows[torch.randperm(160)]
        # E4M3's 448 over the larger one is just below 64, which a float32 logarithm rounds to 64.
        x[:, 0] = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0)) if step % 2 else 5.0
        y = linear(x.requires_grad_())
        y.square().mean().backward()
        emulation.end_step()
        found += [y.detach(), x.grad, linear.weight.grad.clone()]
    return found


@pytest.mark.parametrize("recipe", OPTIONS)
def test_no_option_is_ignored(recipe: str) -> None:
    scaling = parse_recipe(recipe).scaling
    refused = {f.name for f in fields(scaling)} if recipe == "nvfp4_torchao" else set()
    assert {f.name for f in fields(scaling)} - refused <= {option.partition("=")[0] for option in OPTIONS[recipe]}
    plain = trained_under(recipe)
    for option in OPTIONS[recipe]:
        before = option.partition(",")[2]  # what the option is changed beside
        than = trained_under(f"{recipe}({before})") if before else plain
        if option in NOT_EMULATED:
            with pytest.raises(ConfigError, match=rf"does not emulate {option.partition('=')[0]}.*use 'nvfp4'"):
                trained_under(f"{recipe}({option})")
        else:
            assert not all(map(torch.equal, trained_under(f"{recipe}({option})"), than)), option


def test_a_plan_may_be_a_file_and_a_rescue_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for name, layer in {"own": "0", "rescue": "1"}.items():
        Plan((Change(layer, "bf16"),)).save(tmp_path / f"{name}.json")

    def cast() -> list[bool]:
        emulation = Emulation(model, "current", plan=tmp_path / "own.json")
        return [gemm.quantizes("weight") for gemm in emulation._gemms]

    assert cast() == [False, True]
    monkeypatch.setenv(PLAN, str(tmp_path / "rescue.json"))
    assert cast() == [True, False]


def test_a_loop_that_never_ends_a_step_is_warned_once(recwarn: pytest.WarningsRecorder) -> None:
    def train(calls_end_step: bool, recipe: str = "delayed") -> list[str]:
        recwarn.clear()
        model = nn.Linear(8, 8)
        optimizer, emulation = torch.optim.SGD(model.parameters(), lr=0.1), Emulation(model, recipe)
        emulation.attach()
        for _ in range(25):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if calls_end_step:
                emulation.end_step()
        emulation.detach()
        return [str(each.message) for each in recwarn if "end_step" in str(each.message)]

    (said,) = train(False)
    assert "10 steps" in said and "Call `end_step()`" in said
    assert train(True) == [] and train(False, "current") == []

"""Operands of torch.nn.Linear against what autograd itself says they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import Samples, squared_error_under_own_scale
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.capture import operands
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.recipe import parse_recipe


class Block(nn.Module):
    """Two GEMMs with something between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def operands_of(model: nn.Module, x: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
    """X, W and dY of every Linear in one forward and backward, by plain autograd."""
    seen: dict[tuple[str, str], torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def hook(m: nn.Linear, args: tuple[torch.Tensor], out: torch.Tensor, name: str = name) -> None:
                seen[name, "input"], seen[name, "weight"] = args[0].detach().clone(), m.weight.detach().clone()
                out.retain_grad()
                seen[name, "grad_output"] = out

            handles.append(module.register_forward_hook(hook))
    model(x).float().square().mean().backward()
    for handle in handles:
        handle.remove()
    return {k: v.grad if k[1] == "grad_output" else v for k, v in seen.items()}


def train_step(model: nn.Module, batches: list[torch.Tensor], forward: Callable[..., torch.Tensor] | None = None) -> None:
    model.zero_grad()
    for x in batches:
        (forward or model)(x).float().square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_are_those_of_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block().to(dtype), torch.randn(5, 16).to(dtype)
    expected = operands_of(model, x)
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        train_step(model, [x])
    rows = samples.rows(0)
    assert set(rows) == set(expected)
    for key, tensor in expected.items():
        assert rows[key]["n"] == tensor.numel()
        assert rows[key]["amax"] == tensor.abs().max().item()
        assert rows[key]["amin"] == tensor[tensor != 0].abs().min().item()


def test_micro_batches_add_up_and_the_weight_counts_once() -> None:
    torch.manual_seed(0)
    model = Block().bfloat16()
    batches = [torch.randn(3, 16).bfloat16(), 50 * torch.randn(4, 16).bfloat16()]
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, recipe="current", on_error="raise")
    with monitor.step(0):
        train_step(model, batches)
    rows = samples.rows(0)
    assert rows["up", "input"]["n"] == 7 * 16
    assert rows["up", "input"]["calls"] == 2
    assert rows["up", "input"]["amax"] == batches[1].abs().max().item()
    assert rows["up", "weight"]["n"] == 32 * 16
    # Nothing casts here: one scale stands for all micro-batches, as it would for the same rows on several ranks.
    error = squared_error_under_own_scale(torch.cat(batches))
    assert rows["up", "input"]["mse"] == pytest.approx(error / (7 * 16), rel=1e-12)


def test_many_micro_batches_take_no_more_memory_and_give_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is cast with a scale of its own; beyond a few they are measured as they pass."""
    torch.manual_seed(0)
    model = Block().bfloat16()
    emulation = Emulation.from_gemms(find_gemms([model]), parse_recipe("current"))
    emulation.attach()
    batches = [10.0**i * torch.randn(4, 16).bfloat16() for i in range(-2, 4)]
    rows = []
    for kept in (100, operands.KEPT_APART):
        monkeypatch.setattr(operands, "KEPT_APART", kept)
        samples = Samples()
        monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
        with monitor.step(0):
            train_step(model, batches)
        rows.append(samples.rows(0))
        histograms = samples.samples[0].get_table("histograms")
        of_x = [
            i for i, key in enumerate(zip(histograms["layer"], histograms["role"], strict=True)) if key == ("up", "input")
        ]
        assert len(of_x) == (6 if kept == 100 else 1)
    emulation.detach()
    assert rows[0]["up", "input"]["mse"] > 0 and rows[0]["up", "input"]["calls"] == 6
    for key, row in rows[0].items():
        for name, value in row.items():
            assert rows[1][key][name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_counts_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(5, 16).bfloat16().requires_grad_()
    plain, recomputed = Samples(), Samples()
    for samples, forward in (
        (plain, model),
        (recomputed, lambda x: checkpoint(model, x, use_reentrant=reentrant)),
    ):
        monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
        with monitor.step(0):
            train_step(model, [x, x], forward)
    assert recomputed.rows(0) == plain.rows(0)
    assert plain.rows(0)["down", "grad_output"]["calls"] == 2


def test_a_module_called_twice_gives_both_calls() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8).bfloat16()
    samples = Samples()
    monitor = Monitor(nn.Sequential(linear), recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        linear(linear(torch.randn(3, 8).bfloat16())).sum().backward()
    rows = samples.rows(0)
    assert rows["0", "input"]["n"] == rows["0", "grad_output"]["n"] == 2 * 3 * 8
    assert rows["0", "weight"]["n"] == 64


def test_evaluation_inside_a_step_is_not_counted() -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(5, 16).bfloat16()
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        with torch.no_grad():
            model(x)
        train_step(model, [x])
    assert samples.rows(0)["up", "input"]["calls"] == 1


def test_autocast_operands_are_those_of_the_gemm() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 16)
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0), torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
    rows = samples.rows(0)
    assert {row["dtype"] for row in rows.values()} == {"bfloat16"}
    assert rows["up", "weight"]["amax"] == model.up.weight.bfloat16().abs().max().item()


def test_float32_operands_are_measured_directly() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 16)
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, recipe="current", on_error="raise")
    with monitor.step(0):
        train_step(model, [x])
    row = samples.rows(0)["up", "input"]
    assert row["dtype"] == "float32"
    assert row["amax"] == x.abs().max().item()
    scale = torch.tensor(448.0) / x.abs().max()
    q = (x * scale).to(torch.float8_e4m3fn).double() / scale.double()
    assert row["mse"] == pytest.approx((x.double() - q).square().mean().item(), rel=1e-12)


def test_no_grad_output_for_a_frozen_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[0].requires_grad_(False)
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        model(torch.randn(2, 4).bfloat16()).sum().backward()
    assert set(samples.rows(0)) == {("0", "input"), ("0", "weight")} | {("1", r) for r in ("input", "weight", "grad_output")}


def test_layers_compiled_before_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1)
    with pytest.warns(FP8DebugWarning, match=r"1 of 2 layers gave no sample, first 1"):
        with monitor.step(0):
            model[0](torch.randn(2, 4).bfloat16()).sum().backward()
        monitor.close()

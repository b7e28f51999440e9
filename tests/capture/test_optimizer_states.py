"""What optimizers keep: states in fewer bits than they stand for, and what a step adds to a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from typer.testing import CliRunner

from nemo_fp8_debug import Monitor, compare, diagnose, read_record
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.keys import STATES
from nemo_fp8_debug.record.scalars import ScalarRecorder

IN, OUT = 128, 64


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor, step: int) -> None:
    with monitor.step(step):
        model(torch.randn(16, IN)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8, AdamW4bit], ids=lambda kind: kind.__name__)
def test_moments_of_torchaos_optimizers_are_those_that_they_stand_for(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = kind(model.parameters(), lr=1e-3)
    monitor = Monitor(
        model, str(tmp_path), interval=1, table_rows=0, on_error="raise", states=("first_moment", "second_moment")
    )
    expected = {}
    for step in range(2):
        step_once(model, optimizer, monitor, step)
        state = optimizer.state[model.weight]
        for role, name in (("first_moment", "exp_avg"), ("second_moment", "exp_avg_sq")):
            assert type(state[name]) is not torch.Tensor
            expected[step, role] = state[name].dequantize().abs().max().item()
    monitor.close()
    rows = read_record(str(tmp_path), "states")
    assert {(step, role): amax for step, role, amax in rows.select("step", "role", "amax").iter_rows()} == expected


def test_a_step_of_a_weight_and_how_large_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tags: dict[str, float] = {}
    recorder = ScalarRecorder(lambda found, step: tags.update(found), max_tags=1000)
    monitor = Monitor(model, recorders=[recorder], interval=1, on_error="raise", states=("update",))
    before = model.weight.detach().double().clone()
    step_once(model, optimizer, monitor, 0)
    monitor.close()
    ratio = (model.weight.detach().double() - before).norm() / before.norm()
    for kind in ("smallest", "median", "largest"):
        assert tags[f"fp8_states/update_to_weight/{kind}"] == pytest.approx(ratio.item(), rel=1e-5)


def test_norms_and_shares_of_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False), nn.Linear(OUT, OUT, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"states": ("weight_gradient", "update"), "what_if": ["current-e5m2"], "on_error": "raise"}
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, **options)
    before = [layer.weight.detach().double().clone() for layer in model]
    with monitor.step(0):
        model(torch.randn(16, IN)).square().mean().backward()
        gradients = torch.stack([layer.weight.grad.double().norm() for layer in model])
        optimizer.step()
    monitor.close()
    rows = read_record(str(tmp_path), "states").sort("layer")
    assert rows.filter(scale_source="what-if")["norm"].is_null().all()
    mine = rows.filter(scale_source="not quantized", role="weight_gradient")
    assert mine["norm"].to_list() == pytest.approx(gradients.tolist(), rel=1e-6)
    assert mine["share_pct"].to_list() == pytest.approx((100 * gradients**2 / (gradients**2).sum()).tolist(), rel=1e-6)
    ratios = [float((layer.weight.double() - w).norm() / w.norm()) for layer, w in zip(model, before, strict=True)]
    steps = rows.filter(scale_source="not quantized", role="update")
    assert steps["update_to_weight"].to_list() == pytest.approx(ratios, rel=1e-5)


def test_without_moments_there_are_gradient_and_step(tmp_path: Path) -> None:
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise", states=tuple(STATES))
    step_once(model, optimizer, monitor, 0)
    monitor.close()
    rows = read_record(str(tmp_path), "states")
    assert set(rows["role"]) == {"weight_gradient", "update"}
    gradient, update = (rows.filter(role=role)["amax"].item() for role in ("weight_gradient", "update"))
    assert update == pytest.approx(0.1 * gradient, rel=1e-4)


def spoil(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad[0] = float("nan")


class TestTwoRuns:
    @staticmethod
    def trained(folder: Path, rate: float = 1e-3, spoiled: bool = False, spoiled_gradient: bool = False) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(IN, OUT, bias=False), nn.Linear(OUT, OUT, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        monitor = Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise", states=tuple(STATES))
        for step in range(6):
            if spoiled and step == 3:
                optimizer.state[model[0].weight]["momentum_buffer"][0, 0] = float("nan")
            if spoiled_gradient and step == 3:
                model[1].weight.register_post_accumulate_grad_hook(spoil)
            step_once(model, optimizer, monitor, step)
        monitor.close()
        return folder

    def test_a_gradient_that_is_lost_behind_the_backward_pass_is_named(self, tmp_path: Path) -> None:
        told = diagnose(self.trained(tmp_path / "run", spoiled_gradient=True))
        assert (told.cause, told.culprit and told.culprit.tensor_name) == ("nonfinite", "dW of 1")
        assert told.culprit and told.culprit.since == 3 and "then in W of 1 at 4" in told.verdict()

    def test_a_moment_that_is_lost_is_named(self, tmp_path: Path) -> None:
        told = diagnose(self.trained(tmp_path / "run", spoiled=True), self.trained(tmp_path / "baseline"))
        assert told.culprit and (told.culprit.tensor_name, told.culprit.since) == ("m of 0", 3)

    def test_a_step_of_another_size_comes_first(self, tmp_path: Path) -> None:
        found = compare(self.trained(tmp_path / "run", rate=8e-3), self.trained(tmp_path / "baseline")).feature_comparisons[
            "states"
        ]
        assert len(found) == 2 * 3 and found["tensor"].to_list()[:2] == ["step of W"] * 2
        assert found["size_log2"].to_list()[:2] == pytest.approx([3.0, 3.0], abs=0.2)
        assert found["nonfinite_since"].is_null().all()

    def test_a_state_that_is_lost_comes_before_all(self, tmp_path: Path) -> None:
        found = compare(
            self.trained(tmp_path / "run", spoiled=True), self.trained(tmp_path / "baseline")
        ).feature_comparisons["states"]
        first = found.row(0, named=True)
        assert (first["layer"], first["nonfinite_since"]) == ("0", 3)

    def test_it_is_printed_and_in_the_json(self, tmp_path: Path) -> None:
        runs = self.trained(tmp_path / "run", rate=8e-3), "--baseline", self.trained(tmp_path / "baseline")
        both = list(map(str, runs))
        assert "Optimizer states, baseline -> run" in CliRunner().invoke(app, ["compare", *both]).stdout
        told = json.loads(CliRunner().invoke(app, ["compare", *both, "--json"]).stdout)
        assert told["states"][0]["tensor"] == "step of W"

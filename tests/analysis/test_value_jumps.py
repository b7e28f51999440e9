"""X and W that change their size for good: named as such, whatever the scale that follows them does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from nemo_fp8_debug import Emulation, Monitor
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.plan.plan import Change, Plan

STEPS, SINCE = 60, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.fc2(torch.tanh(self.fc1(self.norm(x))) * self.factor)
        return found


def train(
    folder: Path,
    factor: float = 1.0,
    recipe: str | None = None,
    until: int = STEPS,
    weight: float = 1.0,
    plan: Plan | None = None,
    decay: float = 1.0,
) -> Path:
    """A recorded run. From a step on, X of blocks.1.fc2 is multiplied, or its weight, once or in each step."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = nn.Sequential(Block(), Block(), Block())
    model.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    emulation = None if recipe is None else Emulation(model, recipe, layers=["blocks.*"], plan=plan)
    if emulation is not None:
        emulation.attach()
    target: Block = model.blocks[1]  # type: ignore[assignment]
    with closing(Monitor(model, folder, interval=2, table_rows=0, on_error="raise")) as monitor:
        for step in range(STEPS):
            target.factor = factor if SINCE <= step < until else 1.0
            with torch.no_grad():
                target.fc2.weight *= weight if step == SINCE else decay if step > SINCE else 1.0
            with monitor.step(step) as report:
                x = torch.randn(32, 16)
                loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report(loss=loss, lr=1e-3)
            if emulation is not None:
                emulation.end_step()
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("good") / "run", recipe="delayed(amax_history_len=4)")


@pytest.mark.parametrize("recipe", [None, "delayed(amax_history_len=4)", "current", "mxfp8"])
@pytest.mark.parametrize("factor", [1e4, 1e-4])
def test_a_jump_is_named_under_every_recipe(tmp_path: Path, recipe: str | None, factor: float) -> None:
    found = diagnose(train(tmp_path / "run", factor, recipe))
    culprit = found.culprit
    assert culprit is not None and (culprit.layer, culprit.role, culprit.since) == ("blocks.1.fc2", "input", SINCE)
    assert found.cause == "value_jump"
    assert ("larger" if factor > 1 else "smaller") in culprit.evidence


def test_with_a_baseline_the_scale_that_follows_is_not_accused(tmp_path: Path, good: Path) -> None:
    run = train(tmp_path / "run", 1e4, "delayed(amax_history_len=4)")
    found = diagnose(run, good)
    assert (found.cause, found.culprit and found.culprit.layer) == ("value_jump", "blocks.1.fc2")
    said = CliRunner().invoke(app, ["diagnose", str(run), "--baseline", str(good)]).output
    assert "its values jumped to another size" in " ".join(said.split())
    assert "Next: look at what computes X of blocks.1.fc2" in " ".join(said.split())


def test_a_weight_that_jumps_is_named_first(tmp_path: Path) -> None:
    found = diagnose(train(tmp_path / "run", recipe="current", weight=1e4))
    assert (found.cause, found.culprit and found.culprit.role) == ("value_jump", "weight")


def test_values_that_come_back_or_move_little_are_no_jump(tmp_path: Path, good: Path) -> None:
    for name, factor, until in (("short", 1e4, SINCE + 8), ("little", 8.0, STEPS)):
        assert diagnose(train(tmp_path / name, factor, "current", until)).cause != "value_jump"
    assert diagnose(good).cause == "none"


def test_a_plan_is_no_changed_recipe(tmp_path: Path, good: Path) -> None:
    plan = Plan((Change("blocks.1.fc2", "current", ("input",)),))
    run = train(tmp_path / "planned", recipe="delayed(amax_history_len=4)", plan=plan)
    found = diagnose(run, good)
    assert found.cause == "none"
    assert "A plan chose the recipe of X of blocks.1.fc2. This difference from the run's recipe is intended." in found.notes


def test_a_single_weight_that_shrinks_is_named_whatever_its_history(tmp_path: Path) -> None:
    """A scale that must remember larger values for 1,024 steps is not stale, and under current scaling nothing is lost."""
    for recipe in ("delayed", "current"):
        found = diagnose(train(tmp_path / recipe, recipe=recipe, decay=0.8))
        culprit = found.culprit
        assert culprit is not None and (culprit.layer, culprit.role) == ("blocks.1.fc2", "weight")
        assert found.cause == "shrinking_weight" and culprit.since is not None and SINCE <= culprit.since <= SINCE + 2
        assert not [each for each in found.findings if each.cause == "stale_scale"]

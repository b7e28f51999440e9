"""Operands that hold nothing but zeros, and gradient norms of 0: runs that lose their gradients, and healthy ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.cli import app

STEPS, SINCE = 12, 5
BLOCKS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("fc1", "fc2")]


class Zero(torch.autograd.Function):
    """Passes values on, and returns zeros as their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def train(
    folder: Path,
    seed: int = 0,
    model: nn.Module | None = None,
    lost_at: Callable[[int], bool] = lambda step: False,
    lost_in: tuple[str, ...] = (),
    norm: Callable[[float, int], float] = lambda norm, step: norm,
    rate: Callable[[int], float] = lambda step: 0.05,
) -> Path:
    """A recorded run of a few steps; gradients of the outputs of some layers are lost at some steps."""
    torch.manual_seed(seed)
    model, step = model or Model(), 0
    for name, module in model.named_modules():
        if name in lost_in:
            module.register_forward_hook(lambda module, args, out: Zero.apply(out) if lost_at(step) else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    with closing(Monitor(model, folder, interval=1, table_rows=0, on_error="raise")) as monitor:
        for step in range(STEPS):
            with monitor.step(step) as report:
                optimizer.param_groups[0]["lr"] = rate(step)
                x, y = torch.randn(32, 16), torch.randint(8, (32,))
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                report(loss=loss, grad_norm=norm(float(nn.utils.clip_grad_norm_(trained, 1.0)), step))
                optimizer.step()
                optimizer.zero_grad()
    return folder


def losing(since: int, *layers: str) -> Mapping[str, Any]:
    return {"lost_at": lambda step: step >= since, "lost_in": layers}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    """No baseline, one of the same batches, one of another seed."""
    folder = tmp_path_factory.mktemp("good")
    return [None, train(folder / "same"), train(folder / "other", seed=1)]


def asserted(found: Diagnosis, operand: str, since: int, *told: str) -> None:
    assert (found.cause, found.culprit and found.culprit.tensor_name) == ("dead", operand), found.verdict()
    assert found.culprit and found.culprit.since == since
    assert all(words in found.verdict() for words in told), found.verdict()


@pytest.mark.parametrize("since", [0, SINCE])
class TestGradientsThatAreAllZero:
    def test_of_all_layers_but_the_head(self, tmp_path: Path, good: list[Path | None], since: int) -> None:
        run = train(tmp_path / "run", **losing(since, *BLOCKS))
        for baseline in good:
            found = diagnose(run, baseline)
            asserted(found, "dY of blocks.1.fc2", since, f"rom step {since} to the end", "4 of 5 GEMMs", "all but head")
            (advice,) = found.advice
            assert "backward pass of what follows" in advice and "BF16" not in advice

    def test_of_one_block(self, tmp_path: Path, good: list[Path | None], since: int) -> None:
        run = train(tmp_path / "run", **losing(since, *BLOCKS[2:]))
        for baseline in good:
            asserted(diagnose(run, baseline), "dY of blocks.1.fc2", since, "2 of 5", "blocks.1.fc1, blocks.1.fc2")

    def test_of_all_layers_with_a_norm_of_0(self, tmp_path: Path, good: list[Path | None], since: int) -> None:
        run = train(tmp_path / "run", **losing(since, "head"))
        for baseline in good:
            found = diagnose(run, baseline)
            asserted(found, "dY of head", since, "dY is zero in all 5 GEMMs")
            (norm,) = (f for f in found.findings if f.rule == "gradient norm")
            assert (norm.cause, norm.strength, norm.since) == ("dead", "clear", since)
            assert f"exactly 0 at {STEPS - since} of {STEPS} steps" in norm.evidence
            assert (since, "grad_norm") in [(event.step, event.kind) for event in found.events]


def test_recommend_names_no_recipe(tmp_path: Path, good: list[Path | None]) -> None:
    run = train(tmp_path / "run", **losing(SINCE, *BLOCKS))
    said = CliRunner().invoke(app, ["recommend", str(run), "--baseline", str(good[1])]).stdout
    flat = " ".join(said.split())
    assert "Next: look at what computes dY of blocks.1.fc2" in flat and "nothing was written" in flat
    assert "bf16" not in flat.lower() and "mxfp8" not in flat.lower()


def test_an_operand_that_lost_its_values(tmp_path: Path, good: list[Path | None]) -> None:
    model, calls = Model(), iter(range(STEPS))
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * float(next(calls) < SINCE),))
    run = train(tmp_path / "run", model=model)
    for baseline in good:
        found = diagnose(run, baseline)
        asserted(found, "X of blocks.1.fc1", SINCE)
        assert "what runs before" in found.advice[0]


class TestANormOf0:
    def found(self, run: Path, baseline: Path | None = None) -> list[tuple[str, str, int | None]]:
        findings = diagnose(run, baseline).findings
        return [(f.cause, f.strength, f.since) for f in findings if f.rule == "gradient norm"]

    def test_alone_is_no_more_than_a_hint_where_dy_have_values(self, tmp_path: Path, good: list[Path | None]) -> None:
        run = train(tmp_path / "run", norm=lambda norm, step: 0.0 if step >= SINCE else norm)
        assert self.found(run) == self.found(run, good[1]) == [("dead", "hint", SINCE)]
        assert diagnose(run).cause != "dead"

    def test_of_a_single_step_is_no_more_than_a_hint(self, tmp_path: Path) -> None:
        assert self.found(train(tmp_path / "run", lost_at=lambda step: step == SINCE, lost_in=("head",))) == [
            ("dead", "hint", SINCE)
        ]

    def test_at_all_steps_is_how_megatron_says_that_there_is_none(self, tmp_path: Path, good: list[Path | None]) -> None:
        run = train(tmp_path / "run", norm=lambda norm, step: 0.0)
        assert self.found(run) == []
        assert self.found(run, good[1]) == [("dead", "hint", 0)]  # whose norms are known

    def test_of_the_baseline_too_is_not_told(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", **losing(0, "head"))
        assert self.found(run) and not self.found(run, run)


class Adapter(nn.Module):
    """Low-rank adapter, frozen as a whole or with a second weight that begins with zeros."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)
        self.b.weight.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.b(self.a(x))
        return output


class Experts(nn.Module):
    """Every expert is called, the last one without tokens, or with rows that fill up its share."""

    def __init__(self, filled: bool) -> None:
        super().__init__()
        self.filled = filled
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(16, 8, bias=False)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.chunk(x, 2)
        none = x.new_zeros(4, 16) if self.filled else x[:0]
        parts = [expert["w1"](part) for expert, part in zip(self.experts, (*rows, none), strict=True)]
        return torch.cat([*parts[:2], parts[2][:0]])


class Dropped(Model):
    """A block that is left out by chance, as stochastic depth does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (block(x) - x) * float(torch.rand(()) < 0.5)
        output: torch.Tensor = self.head(x)
        return output


class TestHealthyRuns:
    def test_an_adapter_that_warms_up_from_a_rate_of_0(self, tmp_path: Path) -> None:
        model = nn.Sequential(Adapter(is_frozen=False), nn.Linear(16, 8))
        run = train(tmp_path / "run", model=model, rate=lambda step: 0.05 * step)
        rows = diagnose(run).run.metrics.read_all_rows(["amax"]).filter(layer="0.a", role="grad_output")
        assert rows["amax"][0] == rows["amax"][1] == 0 < rows["amax"][2]
        assert self.dead(run) == []

    def test_a_weight_that_is_frozen_at_0(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(16, 16), Adapter(is_frozen=True), nn.Linear(16, 8))
        model[1].a.weight.requires_grad_(False)
        run = train(tmp_path / "run", model=model)
        weights = diagnose(run).run.metrics.read_all_rows(["amax"]).filter(layer="1.b", role="weight")
        assert set(weights["amax"]) == {0.0}
        assert all(role != "weight" for role in self.dead(run))

    @pytest.mark.parametrize("filled", [False, True])
    def test_an_expert_without_tokens(self, tmp_path: Path, filled: bool) -> None:
        run = train(tmp_path / "run", model=Experts(filled))
        rows = diagnose(run).run.metrics.read_all_rows(["amax", "n"]).filter(pl.col("layer") == "experts.2.w1")
        of_gradients = rows.filter(pl.col("role") != "weight")
        assert set(of_gradients["amax"]) <= {0.0, None} and (set(of_gradients["n"]) == {64, 32}) == filled
        assert self.dead(run) == []

    def test_a_block_that_is_dropped_by_chance(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", model=Dropped())
        found = diagnose(run)
        assert found.cause != "dead" and {f.strength for f in found.findings if f.cause == "dead"} <= {"hint"}

    def test_zeros_of_the_baseline_too(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", **losing(0, *BLOCKS))
        assert self.dead(run) == ["grad_output"]
        assert not [f for f in diagnose(run, run).findings if f.cause == "dead"]

    def dead(self, run: Path) -> list[str | None]:
        """Roles that are all zeros."""
        return [f.role for f in diagnose(run).findings if f.cause == "dead"]

"""What `diagnose` says of attention, routers, channels of the residual stream and steps of weights: of real modules whose
parameters are changed while they run, and of the same left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_fp8_debug import Monitor, diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.analysis.diagnosis.rules.channels import channels
from nemo_fp8_debug.analysis.diagnosis.rules.finding import Finding
from nemo_fp8_debug.analysis.runs.run import Run

STEPS, ONSET = 32, 16
WIDTH, HEADS, EXPERTS, TOKENS = 16, 2, 4, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.q(x), *self.kv(x).chunk(2, -1)))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Experts(nn.Module):
    """One expert a token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x.flatten(0, 1)).softmax(-1).topk(1, -1)
        all_of_them = torch.stack([expert(x.flatten(0, 1)) for expert in self.experts], 1)
        return x + (weights * all_of_them[torch.arange(len(chosen)), chosen[:, 0]]).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.attention, self.moe = nn.Linear(WIDTH, WIDTH), Attention(), Experts()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.moe(self.attention(x + self.fc(x)))))


Change = Callable[[Block, int], None]


def nothing(model: Block, age: int) -> None:
    """The run is left alone."""


def louder_queries(model: Block, age: int) -> None:
    model.attention.q.weight.mul_(1.6)


def favored_expert(model: Block, age: int) -> None:
    model.moe.gate.bias[2] = 50.0


def silenced_expert(model: Block, age: int) -> None:
    model.moe.gate.bias[1] = -1e4


def louder_channel(model: Block, age: int) -> None:
    for expert in model.moe.experts:
        expert.bias[5] = 400.0


def trained(folder: Path, change: Change, seed: int = 0, rises: bool = False, rate: float = 1e-3) -> Path:
    """A run whose parameters are changed in each step from the onset on."""
    torch.manual_seed(seed)
    model = Block()
    rest = [p for p in model.parameters() if p is not model.out.weight]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [model.out.weight]}], lr=1e-3)
    options: dict[str, Any] = {"interval": 1, "table_rows": 0, "on_error": "raise", "states": ("weight_gradient", "update")}
    monitor = Monitor(model, str(folder), activations=("norm", "router", "attention"), **options)
    for step in range(STEPS):
        with monitor.step(step) as report:
            if step >= ONSET:
                optimizer.param_groups[1]["lr"] = rate
                with torch.no_grad():
                    change(model, step - ONSET)
            model(torch.randn(2, TOKENS // 2, WIDTH)).square().mean().backward()
            optimizer.step()
            report(loss=2.0 - 0.01 * step + (0.2 * max(0, step - ONSET - 6) if rises else 0.0), lr=1e-3)
        optimizer.zero_grad()
    monitor.close()
    return folder


RULES = ("attention", "router", "experts", "channels", "steps of weights")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def of(change: Change, *more: Any) -> Path:
        return trained(tmp_path_factory.mktemp("run") / change.__name__, change, *more)

    return of


def named(told: Diagnosis) -> dict[str, Finding]:
    return {f.rule: f for f in told.findings if f.rule in RULES}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_goes_well_is_not_accused(run_of: Callable[..., Path], seed: int) -> None:
    assert not named(diagnose(run_of(nothing, seed)))
    assert not named(diagnose(run_of(nothing, seed), run_of(nothing, 1 - seed)))


CASES = {
    louder_queries: ("attention", "attention_logits", "attention"),
    favored_expert: ("router", "router_collapse", "moe.gate"),
    silenced_expert: ("experts", "dead_experts", "moe.gate"),
}


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_what_goes_wrong_is_named_with_its_layer_and_step(run_of: Callable[..., Path], change: Change, paired: bool) -> None:
    rule, cause, layer = CASES[change]
    told = diagnose(run_of(change), run_of(nothing, 1) if paired else None)
    found = named(told)[rule]
    assert (found.cause, found.layer) == (cause, layer) and found.since is not None
    assert ONSET <= found.since <= ONSET + (8 if change is louder_queries else 0)
    assert any(event.step == found.since and layer in event.what for event in told.events)


def test_an_expert_is_named_by_its_number(run_of: Callable[..., Path]) -> None:
    assert "expert 2 " in named(diagnose(run_of(favored_expert)))["router"].evidence
    assert "expert 1 of moe.gate is given no token" in named(diagnose(run_of(silenced_expert)))["experts"].evidence


# Long tests rest on nemo_fp8_debug/analysis/diagnosis/rules/*.py.
@pytest.mark.long
def test_logits_that_explode_before_the_loss_diverges_are_the_cause(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(louder_queries, 0, True), run_of(nothing))
    assert (told.cause, told.confidence, told.harm) == ("attention_logits", "medium", "harmful")
    assert told.culprit and told.culprit.operand == "logits of attention" and "Normalize" not in told.verdict()
    assert any("QK-norm" in advice for advice in told.advice)


def test_logits_that_explode_are_the_cause_without_harm_too_if_a_baseline_has_none(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(louder_queries), run_of(nothing, 1))
    assert (told.harm, told.cause) == ("harmless so far", "attention_logits")
    assert told.blame.finding == named(told)["attention"]
    alone = diagnose(run_of(louder_queries))
    assert named(alone) and alone.cause == "unknown" and "nothing wrong" not in alone.verdict()


def test_that_nothing_is_wrong_is_less_sure_where_an_expert_is_silent(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(silenced_expert), run_of(nothing, 1))
    assert (told.cause, told.confidence) == ("none", None) and "experts" in named(told)
    assert diagnose(run_of(nothing), run_of(nothing, 1)).confidence == "high"


@pytest.mark.long
def test_a_weight_with_another_learning_rate_is_named(run_of: Callable[..., Path]) -> None:
    told = named(diagnose(run_of(nothing, 0, False, 2.0)))["steps of weights"]
    assert (told.cause, told.layer, told.since) == ("step_size", "out", ONSET) and "no other weight" in told.evidence


def test_a_weight_that_stands_still_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    with torch.no_grad():
        model[1].weight.fill_(4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, states=("weight_gradient", "update"))
    for step in range(8):
        with monitor.step(step) as report:
            loss = model(torch.randn(4, 8).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            report(loss=float(loss.detach()), lr=1e-3)
        optimizer.zero_grad()
    monitor.close()
    found = named(diagnose(tmp_path))["steps of weights"]
    assert (found.layer, found.since) == ("1", 0) and "W of 1 stands still in 8 sampled steps" in found.evidence


@pytest.mark.long
def test_the_channel_that_an_outlier_comes_from_is_named(run_of: Callable[..., Path]) -> None:
    run = Run.read(run_of(louder_channel))
    culprit = Finding("operand", "outlier", "medium", "", layer="out", role="input", since=ONSET + 4)
    for baseline in (None, Run.read(run_of(nothing, 1))):
        found = channels(run, baseline, culprit, None)
        assert found and (found.layer, found.role, found.since) == ("norm", "norm_input", ONSET)
        assert "channel 5 of the input of norm" in found.evidence and "4 steps before X of out" in found.evidence
    assert channels(Run.read(run_of(nothing)), None, culprit, None) is None


@pytest.mark.long
def test_a_channel_is_told_where_nothing_else_is_wrong_if_the_baseline_has_none(run_of: Callable[..., Path]) -> None:
    run, baseline = Run.read(run_of(louder_channel)), Run.read(run_of(nothing, 1))
    found = channels(run, baseline, None, None)
    assert found and (found.layer, found.since, found.confidence) == ("norm", ONSET, "low")
    assert found.evidence.endswith(" at the most")
    assert channels(run, None, None, None) is None and channels(run, run, None, None) is None

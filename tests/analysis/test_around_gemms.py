"""What `diagnose` says of attention, routers and steps of weights.

Real modules run, once with changed parameters and once as they are.
"""

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
from nemo_fp8_debug.analysis.diagnosis.finding import Finding

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


RULES = ("attention", "router", "weight steps")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def of(change: Change, *more: Any) -> Path:
        return trained(tmp_path_factory.mktemp("run") / change.__name__, change, *more)

    return of


def named(told: Diagnosis) -> dict[str, Finding]:
    """Findings between GEMMs by their cause."""
    return {f.cause: f for f in told.findings if f.rule in RULES}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_goes_well_is_not_accused(run_of: Callable[..., Path], seed: int) -> None:
    assert not named(diagnose(run_of(nothing, seed)))
    assert not named(diagnose(run_of(nothing, seed), run_of(nothing, 1 - seed)))


CASES = {
    louder_queries: ("attention_logits", "attention"),
    favored_expert: ("router_collapse", "moe.gate"),
    silenced_expert: ("dead_experts", "moe.gate"),
}


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_what_goes_wrong_is_named_with_its_layer_and_step(run_of: Callable[..., Path], change: Change, paired: bool) -> None:
    cause, layer = CASES[change]
    told = diagnose(run_of(change), run_of(nothing, 1) if paired else None)
    found = named(told)[cause]
    assert found.layer == layer and found.since is not None
    assert ONSET <= found.since <= ONSET + (8 if change is louder_queries else 0)
    assert any(event.step == found.since and layer in event.what for event in told.events)


def test_an_expert_is_named_by_its_number(run_of: Callable[..., Path]) -> None:
    assert "expert 2 " in named(diagnose(run_of(favored_expert)))["router_collapse"].evidence
    assert "expert 1 of moe.gate gets no token" in named(diagnose(run_of(silenced_expert)))["dead_experts"].evidence


# Long tests rest on nemo_fp8_debug/observations/activations/rule.py and nemo_fp8_debug/observations/states/rule.py.
@pytest.mark.long
def test_logits_that_explode_before_the_loss_diverges_are_the_cause(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(louder_queries, 0, True), run_of(nothing))
    assert (told.cause, told.harm) == ("attention_logits", "harmful")
    assert told.culprit and told.culprit.tensor_name == "logits of attention"
    assert any("QK-norm" in advice for advice in told.advice)


def test_logits_that_explode_are_the_cause_without_harm_too_if_a_baseline_has_none(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(louder_queries), run_of(nothing, 1))
    assert (told.harm, told.cause) == ("harmless so far", "attention_logits")
    assert told.decision.finding == named(told)["attention_logits"]
    alone = diagnose(run_of(louder_queries))
    assert (alone.cause, alone.confidence, alone.harm) == ("attention_logits", "medium", "unknown")


def test_an_expert_that_is_silent_is_told_and_accused_of_nothing(run_of: Callable[..., Path]) -> None:
    told = diagnose(run_of(silenced_expert), run_of(nothing, 1))
    assert (told.cause, told.confidence) == ("none", None) and "expert 1 of moe.gate" in told.verdict()


@pytest.mark.long
def test_a_weight_with_another_learning_rate_is_named(run_of: Callable[..., Path]) -> None:
    told = named(diagnose(run_of(nothing, 0, False, 2.0)))["step_size"]
    assert (told.cause, told.layer, told.since) == ("step_size", "out", ONSET) and "more weights" not in told.evidence


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
    found = named(diagnose(tmp_path))["frozen_weights"]
    assert (found.cause, found.layer, found.since) == ("frozen_weights", "1", 0)
    assert "W of 1 stands still in 8 sampled steps" in found.evidence

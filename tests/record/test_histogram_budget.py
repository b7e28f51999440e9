"""Options that record fewer histograms: metrics stay, and what verdicts name keeps its histograms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_fp8_debug import Config, ConfigError, Monitor, replay
from nemo_fp8_debug.record.reader import read_table

EXPERTS = 5


class Experts(nn.Module):
    """Experts of which the third has outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(EXPERTS))
        with torch.no_grad():
            self.experts[3].weight[0, 0] = 1e5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros(()))


def record(run: Path, model: nn.Module, steps: range, nan_at: int | None = None, **options: Any) -> None:
    monitor = Monitor(model.bfloat16(), run, table_rows=0, recipe="current", **options)
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        with monitor.step(step):
            (model(x) * (torch.nan if step == nan_at else 1)).sum().backward()
    monitor.close()


def test_each_role_has_an_interval_and_what_has_nan_is_kept(tmp_path: Path) -> None:
    intervals = {"weight": 20, "grad_output": 30}
    record(tmp_path, nn.Linear(32, 32), range(70), nan_at=50, interval=10, histogram_interval=intervals)
    found = read_table(tmp_path, "histograms")
    steps = {role[0]: rows["step"].to_list() for role, rows in found.group_by("role")}
    assert steps == {"input": list(range(0, 70, 10)), "weight": [0, 20, 40, 50, 60], "grad_output": [0, 30, 50, 60]}
    assert len(read_table(tmp_path, "metrics")) == 3 * 7


def test_one_interval_of_all(tmp_path: Path) -> None:
    record(tmp_path, nn.Linear(32, 32), range(6), interval=1, histogram_interval=4)
    assert read_table(tmp_path, "histograms")["step"].to_list() == 3 * [0] + 3 * [4]


def test_experts_are_one_and_the_worst(tmp_path: Path) -> None:
    for kind in ("all", "worst"):
        torch.manual_seed(0)
        record(tmp_path / kind, Experts(), range(1), interval=1, expert_histograms=kind)
    every, fewer = (read_table(tmp_path / kind, "histograms") for kind in ("all", "worst"))
    assert len(every) == 3 * EXPERTS and len(fewer) == 3 * 2
    assert sorted(fewer.filter(role="weight")["layer"]) == ["experts.*", "experts.3"]
    for role in ("input", "weight", "grad_output"):
        total = fewer.filter(role=role, layer="experts.*")["counts"].list.sum().item()
        assert total == every.filter(role=role)["counts"].list.sum().sum()
    assert (
        read_table(tmp_path / "all", "metrics")
        .drop("nonfinite_order")
        .equals(read_table(tmp_path / "worst", "metrics").drop("nonfinite_order"), null_equal=True)
    )
    replayed = replay(tmp_path / "worst", "current-e5m2").filter(layer="experts.*", role="weight")
    assert (
        replayed["amax"].to_list()
        == read_table(tmp_path / "all", "metrics").filter(layer="experts.*", role="weight")["amax"].to_list()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"histogram_interval": 0}, "histogram_interval is 0; it must be a whole number, at least 1"),
        ({"histogram_interval": {"weight": "x"}}, "histogram_interval of weight is 'x'; it must be a whole number"),
        ({"histogram_interval": {"bias": 3}}, "histogram_interval has the role 'bias'; use input, weight, grad_output"),
        ({"expert_histograms": "best"}, "expert_histograms is 'best'; use 'all' or 'worst'"),
    ],
)
def test_mistakes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Config(**options)

"""`histogram_interval`: metrics stay, and what verdicts name keeps its histograms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_fp8_debug import Config, ConfigError, Monitor
from nemo_fp8_debug.record.reader import read_table_rows


def record(run: Path, model: nn.Module, steps: range, nan_at: int | None = None, **options: Any) -> None:
    monitor = Monitor(model.bfloat16(), run, table_rows=0, recipe="current", **options)
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        with monitor.step(step):
            (model(x) * (torch.nan if step == nan_at else 1)).sum().backward()
    monitor.close()


def test_histograms_have_an_interval_and_what_has_nan_is_kept(tmp_path: Path) -> None:
    record(tmp_path, nn.Linear(32, 32), range(70), nan_at=50, interval=10, histogram_interval=30)
    found = read_table_rows(tmp_path, "histograms")
    steps = {role[0]: rows["step"].to_list() for role, rows in found.group_by("role")}
    assert steps == {role: [0, 30, 50, 60] for role in ("input", "weight", "grad_output")}
    assert len(read_table_rows(tmp_path, "metrics")) == 3 * 7


@pytest.mark.parametrize("given", [0, "x", {"weight": 3}])
def test_mistakes(given: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"histogram_interval is {given!r}; it must be a whole number")):
        Config(histogram_interval=given)

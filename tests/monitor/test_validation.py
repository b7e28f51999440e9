"""Losses of evaluations: recorded with the step that they came after, as they were then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor, read_record


def trained(folder: Path, steps: int = 3) -> Monitor:
    model = nn.Linear(4, 4)
    monitor = Monitor(model, folder, interval=2, table_rows=0)
    for step in range(steps):
        with monitor.step(step) as report:
            (loss := model(torch.ones(2, 4)).square().mean()).backward()
            report(loss=loss)
    return monitor


def test_by_name_and_step(tmp_path: Path) -> None:
    monitor, loss = trained(tmp_path), torch.tensor(1.5)
    monitor.report_validation(web=loss, code=2.5)
    loss.fill_(9.0)  # what the host does with it later
    monitor.report_validation(step=1, web=3.5)
    monitor.close()
    monitor.report_validation(web=0.0)
    found = read_record(tmp_path, "validation")
    assert found.select("step", "name", "loss").rows() == [(1, "web", 3.5), (2, "web", 1.5), (2, "code", 2.5)]
    assert found["time"].is_between(1.6e9, 1e11).all()


def test_what_is_no_number_is_named_and_the_rest_recorded(tmp_path: Path) -> None:
    monitor = trained(tmp_path)
    with pytest.warns(FP8DebugWarning, match="logits of an evaluation is not recorded: it is not a scalar but Tensor of 2"):
        monitor.report_validation(logits=torch.ones(2), web=1.0)
    monitor.report_validation()
    monitor.close()
    assert read_record(tmp_path, "validation", ["name"])["name"].to_list() == ["web"]


def test_a_record_without_any_has_none(tmp_path: Path) -> None:
    trained(tmp_path).close()
    assert read_record(tmp_path, "validation").is_empty()

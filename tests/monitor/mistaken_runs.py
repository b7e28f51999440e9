"""A small run with mistakes in its loop: its losses, what was warned, and what was sampled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.record.reader import read_table_rows

Loop = Callable[[Monitor, int, Callable[[], torch.Tensor]], Any]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def in_a_step(monitor: Monitor, step: Any, train: Callable[[], torch.Tensor]) -> None:
    with monitor.step(step) as report:
        report(loss=train())


def trained(
    folder: Path | None,
    loop: Loop = in_a_step,
    steps: Iterable[Any] = range(4),
    change: Callable[[nn.Sequential], Any] = lambda model: None,
    **options: Any,
) -> tuple[list[float], list[str]]:
    """Losses of a run, and what was warned; not monitored where there is no folder."""
    model, losses = two_layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, dtype=model[1].weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return loss

    options = {"interval": 1, "table_rows": 0} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, folder, **options) if folder else None
        for i, step in enumerate(steps):
            if i == 1:
                change(model)
            loop(monitor, step, train) if monitor else train()
        if monitor:
            monitor.close()
    return losses, [str(w.message).removeprefix("nemo_fp8_debug: ") for w in caught if w.category is FP8DebugWarning]


def warned(folder: Path, *arguments: Any, **options: Any) -> list[str]:
    """What was warned in a run that went on bit-identically."""
    losses, messages = trained(folder, *arguments, **options)
    assert losses == trained(None, *arguments, **options)[0] and losses
    return messages


def sampled(folder: Path) -> list[int]:
    return read_table_rows(folder, "metrics")["step"].unique().to_list()

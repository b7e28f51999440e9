"""A run whose control file is edited while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.record.reader import read_table_rows


def run(
    folder: Path,
    edits: Mapping[int, str | bytes | None],
    steps: int = 60,
    start: int = 0,
    close: bool = True,
    **options: Any,
) -> list[str]:
    """Train; the control file is as `edits` say after each step (None: removed). Returns what was warned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    options = {"interval": 10, "table_rows": 0, "dump_min_free_bytes": 0, "on_error": "raise"} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, str(folder), **options)
        for step in range(start, steps):
            monitor.begin_step(step)
            model(torch.randn(4, 8).bfloat16()).float().sum().backward()
            monitor.end_step(loss=1.0)
            if step in edits:
                text = edits[step]
                file = folder / "control.yaml"
                file.unlink() if text is None else file.write_bytes(text if isinstance(text, bytes) else text.encode())
        monitor.close() if close else monitor.flush()
    return [str(w.message) for w in caught if w.category is FP8DebugWarning]


def sampled(folder: Path, **where: Any) -> list[int]:
    return read_table_rows(folder, "metrics", where=where)["step"].unique().to_list()

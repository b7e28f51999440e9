"""A small run to be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.reader import find_record
from nemo_fp8_debug.record.storage import FolderStorage


def train(
    folder: Path,
    recipe: str | dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    start: int = 0,
    steps: int = 5,
    **more: Any,
) -> FolderStorage:
    """Steps of two micro-batches whose scale changes from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    monitor = Monitor(
        model, str(folder), interval=1, recipe=recipe, table_rows=0, on_error="raise", dump_min_free_bytes=0, **more
    )
    for step in range(start, start + steps):
        with monitor.step(step):
            for i in range(2):
                model((2.0 ** (step % 7) * (1 + i) * torch.randn(4, 16)).to(dtype)).float().square().mean().backward()
    monitor.close()
    return find_record(folder)


DELAYED = {"name": "delayed", "amax_history_len": 2, "margin": 1}

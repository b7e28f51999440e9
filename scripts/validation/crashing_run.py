"""The run that crash_recovery.py kills and resumes."""

from __future__ import annotations

import os
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two runs must round alike

import numpy as np
import torch
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.kernels.cpu.histogram import count_bit_patterns
from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.reader import read_fingerprint

# Compiled once, and not in each run that is forked.
count_bit_patterns(np.zeros(8, np.uint16), np.zeros(1 << 15, np.int64), threads=1)

#: parts merged into one; low, so that kills hit merging
MERGED = 4
#: steps between checkpoints
CHECKPOINT = 7


def train(folder: Path, length: int, says: Connection | None) -> None:
    """Train from the last checkpoint on, or from the start; says which step begins, once those before are recorded."""
    torch.set_num_threads(1)
    warnings.showwarning = end_at_a_warning
    merging.MERGED = MERGED
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 512), nn.Linear(512, 96)).bfloat16()
    checkpoint = folder / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        first, weights = torch.load(checkpoint)
        model.load_state_dict(weights)
    options: dict[str, Any] = {"recipe": "current-e4m3", "what_if": ["current-e5m2"], "dump": ["1"]}
    monitor = Monitor(model, str(folder / "run"), interval=1, table_rows=0, dump_min_free_bytes=0, **options)
    attempt = read_fingerprint(folder / "run")["attempt"]
    for step in range(first, length):
        monitor.begin_step(step)  # waits for the samples before
        if says:
            says.send((attempt, first, step))
        monitor.end_step(loss=train_step(model, step))
        if (step + 1) % CHECKPOINT == 0:
            torch.save((step + 1, model.state_dict()), checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    monitor.close()
    if says:
        says.send((attempt, first, length))


def end_at_a_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, FP8DebugWarning):
        print(message, file=sys.stderr, flush=True)
        os._exit(3)


def train_step(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(step)).bfloat16()
    model.zero_grad()
    loss = (model(x) - x.roll(1, 1)).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    return loss.detach()

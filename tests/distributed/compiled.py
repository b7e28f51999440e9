"""A model of which one of two ranks has compiled a part: `compiled.py FOLDER`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor

STEPS = 4


def train(rank: int, folder: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4))
    if rank == 1:
        model[0] = torch.compile(model[0], backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, folder, interval=2, table_rows=0) if folder else None
    losses = []
    for step in range(STEPS):
        if monitor:
            monitor.begin_step(step)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor:
            monitor.end_step(loss=loss)
    if monitor:
        monitor.close()
    return {"losses": losses, "weights": [p.tolist() for p in model.parameters()]}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain = train(rank, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(rank, folder / "run")
    said = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
    (folder / f"rank-{rank}.json").write_text(json.dumps({"plain": plain, "watched": watched, "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(2, main, Path(sys.argv[1]))

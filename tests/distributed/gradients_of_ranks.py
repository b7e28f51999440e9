"""Gradients of weights over ranks: `gradients_of_ranks.py FOLDER`; oracle.json has float64 figures of whole gradients."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Monitor

STEPS, WORLD = 3, 2
KINDS = ("ddp", "ddp-views", "ddp-late", "fsdp2", "fsdp2-late", "by-hand", "unsynced")


class Model(nn.Module):
    """Its second half is done again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(32, 48), nn.Linear(48, 25), nn.Linear(25, 25)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(checkpoint(self.second, self.first(x).relu(), use_reentrant=False))


def figures(x: torch.Tensor) -> dict[str, float]:
    """Of a whole tensor."""
    nonfinite = int((~x.isfinite()).sum())
    norm = math.nan if nonfinite else x.double().norm().item()
    return {"norm": norm, "zeros": int((x == 0).sum()), "nonfinite": nonfinite, "elements": x.numel()}


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(rank: int, world: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = Model()
    layers = {"first": model.first, "second": model.second}
    late = kind.endswith("late") or kind == "unsynced"
    if kind.startswith("fsdp2"):
        for layer in (*layers.values(), model.frozen, model):
            fully_shard(layer)
    elif kind != "by-hand":
        model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp-views")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    monitor = Monitor(model, str(folder / kind), interval=1, table_rows=0, on_error="raise")
    oracle: dict[str, Any] = {}
    for step in range(STEPS):
        with monitor.step(step) as report:
            for micro_batch in range(3 if late else 1):
                last = not late or (micro_batch == 2 and kind != "unsynced")
                if kind == "fsdp2-late":
                    model.set_requires_gradient_sync(last)
                with contextlib.nullcontext() if last or kind == "fsdp2-late" else model.no_sync():
                    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + 3 * micro_batch + rank))
                    loss = model(x).square().mean() * (torch.inf if step == 1 and rank == 1 and last else 1)
                    loss.backward()
            if kind == "by-hand":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
            oracle |= {f"{step}/{name}": figures(whole(layer.weight.grad)) for name, layer in layers.items()}
            report(loss=loss)
        if step != 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    if rank == 0:
        (folder / kind / "oracle.json").write_text(json.dumps(oracle))
    dist.destroy_process_group()


if __name__ == "__main__":
    for kind in KINDS:
        in_ranks(WORLD, train, Path(sys.argv[1]), kind, frees_memory=False)

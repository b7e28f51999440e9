"""Optimizer states over ranks: `states_of_ranks.py FOLDER`; oracle.json of a run has float64 figures of whole tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.core.keys import STATES

STEPS = 3
WORLDS = (1, 2, 4)


def figures(x: torch.Tensor) -> dict[str, float]:
    """In float64, of a whole tensor."""
    x = x.double()
    return {"n": x.numel(), "amax": x.abs().max().item(), "kurtosis": (x.pow(4).mean() / x.pow(2).mean() ** 2).item()}


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(rank: int, world: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 24))
    layers = {"0": model[0], "2": model[2]}
    if kind == "fsdp2":
        for layer in layers.values():
            fully_shard(layer)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = folder / f"{kind}-{world}"
    monitor = Monitor(model, str(run), interval=1, table_rows=0, on_error="raise", states=tuple(STATES), what_if=["bf16"])
    oracle: dict[str, Any] = {}
    for step in range(STEPS):
        with monitor.step(step) as report:
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * world + rank))
            loss = model(x).square().mean()
            loss.backward()
            earlier = {name: whole(layer.weight.detach()).clone() for name, layer in layers.items()}
            optimizer.step()
            report(loss=loss)
        for name, layer in layers.items():
            state = optimizer.state[layer.weight]
            known = {"first_moment": state["exp_avg"], "second_moment": state["exp_avg_sq"]}
            known["weight_gradient"] = layer.weight.grad
            known["update"] = whole(layer.weight.detach()) - earlier[name]
            oracle |= {f"{step}/{name}/{role}": figures(whole(tensor)) for role, tensor in known.items()}
        optimizer.zero_grad()
    monitor.close()
    if rank == 0:
        (run / "oracle.json").write_text(json.dumps(oracle))
    dist.destroy_process_group()


def train_flattened(rank: int, world: int, folder: Path) -> None:
    """Under FSDP1, whose parameters are flat parts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 24))
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"interval": 1, "table_rows": 0, "states": tuple(STATES), "replicas": True}
    monitor = Monitor(model, str(folder / f"fsdp1-{world}"), **options)
    for step in range(STEPS):
        with monitor.step(step):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(2, train_flattened, Path(sys.argv[1]), frees_memory=False)
    for world in WORLDS:
        for kind in ("ddp", "fsdp2"):
            in_ranks(world, train, Path(sys.argv[1]), kind, frees_memory=False)

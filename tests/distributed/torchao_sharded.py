"""torchao's layers on two ranks, with and without a monitor: `torchao_sharded.py FOLDER MODE,MODE...`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import Samples
from processes import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

from nemo_fp8_debug import Monitor

WIDTH, WORLD, STEPS = 32, 2, 3


def model(name: str, **options: Any) -> nn.Module:
    """With biases: gloo gathers FP8 only together with other dtypes, as bytes."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)), nn.Sequential(nn.Linear(WIDTH, 16))
    )
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True, **options)
    converted: nn.Module = convert_to_float8_training(net, config=config)
    return converted


def sharded(by: Callable[[nn.Module], list[nn.Module]], name: str = "tensorwise", gather: bool = True) -> nn.Module:
    net = model(name, enable_fsdp_float8_all_gather=gather)
    for part in [*by(net), net]:
        fully_shard(part, reshard_after_forward=True)
    return net


def split(columns: Any, rows: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    return parallelize_module(model("tensorwise"), mesh, {"0.0": columns, "0.2": rows})


def linears(net: nn.Module) -> list[nn.Module]:
    return [m for m in net.modules() if isinstance(m, nn.Linear)]


MODES: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: sharded(lambda net: list(net.children())),
    "linear": lambda: sharded(linears),
    "precomputed": lambda: sharded(lambda net: list(net.children())),
    "high precision": lambda: sharded(linears, "rowwise", gather=False),
    "tp": lambda: split(ColwiseParallel(), RowwiseParallel()),
    "float8 tp": lambda: split(Float8ColwiseParallel(), Float8RowwiseParallel()),
}


def train(mode: str, monitored: bool, rank: int) -> dict[str, Any]:
    net, samples = MODES[mode](), Samples()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    monitor = Monitor(net, recorders=[samples], interval=2) if monitored else None
    losses, weights = [], []
    for step in range(STEPS):
        if mode == "precomputed":
            precompute_float8_dynamic_scale_for_fsdp(net)
        weights.append({name: whole(p) for name, p in net.named_parameters()})
        if monitor:
            monitor.begin_step(step)
        of = torch.Generator().manual_seed(step * WORLD + (0 if "tp" in mode else rank))
        loss = net(torch.randn(24, WIDTH, generator=of)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.end_step()
    if monitor:
        monitor.close()
    rows = {step: samples.rows(step) for step in samples.samples}
    return {"losses": losses, "weights": weights, "rows": rows}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of it, by the parts of all ranks."""
    part = getattr(parameter, "_local_tensor", parameter)
    part = getattr(part, "_tensor", part).detach()
    if part is parameter or not hasattr(parameter, "placements"):
        return part.clone()
    parts: list[Any] = [None] * WORLD
    dist.all_gather_object(parts, part.clone())
    return torch.cat(parts, parameter.placements[0].dim) if parameter.placements[0].is_shard() else part.clone()


def run(rank: int, world: int, folder: str, modes: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for mode in modes.split(","):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched = train(mode, True, rank)
        found[mode] = watched | {
            "unwatched": train(mode, False, rank),
            "warnings": [str(w.message) for w in caught if "nemo_fp8_debug" in str(w.category)],
        }
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(WORLD, run, *sys.argv[1:])

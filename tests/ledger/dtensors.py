"""Ledgers of layers whose weights are DTensors, as JSON; over a group that does nothing."""

from __future__ import annotations

import json

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo_fp8_debug.coverage.scan import ledger_of

RANKS, TP, WIDTH = 4, 2, 16


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


LAYOUTS = {
    "FSDP2": lambda model, mesh: fully_shard(model, mesh=mesh["dp"]),
    "HSDP": lambda model, mesh: fully_shard(model, mesh=mesh),
    "FSDP2 by layer": lambda model, mesh: [fully_shard(part, mesh=mesh["dp"]) for part in (*model, model)],
    "tensor parallelism": lambda model, mesh: split(model, mesh["tp"]),
    "both": lambda model, mesh: fully_shard(split(model, mesh["tp"]), mesh=mesh["dp"]),
}


def found(layout: str, mesh: DeviceMesh) -> list[float]:
    """Forward and backward of the ledger."""
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False))
    LAYOUTS[layout](model, mesh)
    ledger = ledger_of([model])
    return [ledger.forward(), ledger.backward()]


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    of_ranks = init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("dp", "tp"))
    print(json.dumps({layout: found(layout, of_ranks) for layout in LAYOUTS}))
    dist.destroy_process_group()

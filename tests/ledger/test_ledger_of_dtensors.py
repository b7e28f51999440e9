"""The ledger of layers whose weights are DTensors, over a group whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ledger_models import close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo_fp8_debug.coverage.observer import observe_coverage
from nemo_fp8_debug.coverage.scan import ledger_of

RANKS, TP, ROWS = 4, 2, 8
WHOLE = 16 * 32 + 32 * 16


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


LAYOUTS = {
    "FSDP2": (lambda model, mesh: fully_shard(model, mesh=mesh["dp"]), 1),
    "HSDP": (lambda model, mesh: fully_shard(model, mesh=mesh), 1),
    "FSDP2 by layer": (lambda model, mesh: [fully_shard(part, mesh=mesh["dp"]) for part in (*model, model)], 1),
    "tensor parallelism": (lambda model, mesh: split(model, mesh["tp"]), TP),
    "both": (lambda model, mesh: fully_shard(split(model, mesh["tp"]), mesh=mesh["dp"]), TP),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_multiplies_its_part_of_tensor_parallelism_and_all_that_fsdp2_gathers(layout: str, mesh: DeviceMesh) -> None:
    lay_out, parts = LAYOUTS[layout]
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    lay_out(model, mesh)
    ledger = ledger_of([model])
    assert ledger.forward() == close(WHOLE / parts)
    with observe_coverage(model) as counted:
        model(torch.randn(ROWS, 16, requires_grad=True)).sum().backward()
    assert counted.total("forward") == close(ROWS * ledger.forward())
    assert counted.total("backward") == close(ROWS * ledger.backward())

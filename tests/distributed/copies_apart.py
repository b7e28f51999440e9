"""Copies over ranks, some of which come apart: `copies_apart.py FOLDER`; each case trains over processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from product_faults.faults import FAULTS, FaultyKernel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nemo_fp8_debug import Monitor

STEPS, ONSET, WRONG_RANK, WORLD = 6, 3, 2, 4


def wrong_weight(step: int, rank: int, model: nn.Module) -> None:
    """Hardware flips a bit of one value of a weight of a rank."""
    if step == ONSET and rank == WRONG_RANK:
        model.get_submodule("module.2").weight.data.view(torch.int16)[3, 4] ^= 1


def stale_gather(rank: int, state: dict[str, int], module: nn.Module, args: Any) -> None:
    """What a rank has gathered is what it had before the update."""
    if state["step"] == ONSET and rank == WRONG_RANK:
        module.weight.data.add_(0.01)


def unreduced(step: int, rank: int, model: nn.Module) -> None:
    """A rank misses a part of an all-reduce."""
    if step >= ONSET and rank == WRONG_RANK:
        model.get_submodule("module.0").weight.grad.mul_(1.25)


class Masters:
    """An optimizer that keeps float32 weights where Megatron's do; on one rank it misses an update of what is trained."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.parameters, self.rank = list(model.parameters()), rank
        for parameter in self.parameters:
            parameter.main_param = parameter.detach().float().clone()
        self.optimizer = torch.optim.SGD([parameter.main_param for parameter in self.parameters], lr=0.01)

    def step(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.main_param.grad = parameter.grad.float()
        self.optimizer.step()
        for number, parameter in enumerate(self.parameters):
            if (step, number, self.rank) != (ONSET - 1, 2, WRONG_RANK):
                parameter.data.copy_(parameter.main_param)


def train(rank: int, world: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).bfloat16()
    state = {"step": -1}
    if case == "gathered":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        model[2].register_forward_pre_hook(lambda module, args: stale_gather(rank, state, module, args))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    masters = Masters(model, rank) if case == "master" else None
    monitor = Monitor(model, str(folder / case), interval=1, table_rows=0, on_error="raise", replicas=True, verify_rows=16)
    for step in range(STEPS):
        state["step"] = step
        if case == "weight":
            wrong_weight(step, rank, model)
        faulty = case == "kernel" and step == ONSET and rank == WRONG_RANK
        with monitor.step(step) as report:
            kernel = FaultyKernel(FAULTS["factor"], 1 if faulty else -1)
            with kernel:
                x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step * world + rank)).bfloat16()
                loss = model(x).float().square().mean()
                loss.backward()
            if case == "gradient":
                unreduced(step, rank, model)
            masters.step(step) if masters else optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    for case in ("clean", "weight", "gradient", "gathered", "kernel", "master"):
        in_ranks(WORLD, train, Path(sys.argv[1]), case, frees_memory=False)

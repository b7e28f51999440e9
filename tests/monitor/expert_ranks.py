"""Two ranks, each a process with two of four experts: `expert_ranks.py FOLDER`; the last gets no token."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn

from nemo_fp8_debug import Monitor

EXPERTS = 2


def main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    names = [str(EXPERTS * rank + i) for i in range(EXPERTS)]
    model = nn.ModuleDict(
        {
            "router": nn.Linear(16, 4),  # on both ranks, as all that is not split over experts
            "experts": nn.ModuleDict({name: nn.ModuleDict({"w1": nn.Linear(16, 32)}) for name in names}),
        }
    ).bfloat16()
    monitor = Monitor(model, folder, interval=1, table_rows=0, on_error="raise", what_if=["current-e4m3"])
    for step in range(2):
        with monitor.step(step):
            x = (torch.randn(8, 16) * 2.0**rank).bfloat16()
            loss = model["router"](x).float().sum()
            for i, name in enumerate(names):
                if name != "3":
                    loss = loss + model["experts"][name]["w1"](x[i : 3 + 2 * i]).float().square().sum()
            loss.backward()
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(2, main, sys.argv[1])

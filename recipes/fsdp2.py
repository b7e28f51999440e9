"""Train with FSDP2 in plain PyTorch, on GPUs or CPUs: `torchrun --nproc-per-node 2 recipes/fsdp2.py`."""

from __future__ import annotations

import argparse
from contextlib import closing

import torch
import torch.distributed as dist
from plain_loop import model
from text_windows import TextWindows
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from nemo_fp8_debug import Monitor

ACCUMULATED = 2


def train(output: str, steps: int, interval: int, device: torch.device) -> None:
    gpt = model().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*gpt.layers, gpt]:
        fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    windows = TextWindows(4 * ACCUMULATED * steps * dist.get_world_size(), 64)
    data = iter(DataLoader(windows, batch_size=4, sampler=DistributedSampler(windows, shuffle=False)))

    # Create the monitor on every rank. The first rank writes. The accumulated batches of a step form one sample.
    with closing(Monitor(gpt, output, interval=interval)) as monitor:
        for step in range(steps):
            with monitor.step(step) as report:
                total = torch.zeros((), device=device)
                for micro_batch in range(ACCUMULATED):
                    gpt.set_requires_gradient_sync(micro_batch == ACCUMULATED - 1)
                    batch = {name: value.to(device) for name, value in next(data).items()}
                    loss = nn.functional.cross_entropy(gpt(batch["tokens"]).flatten(0, 1).float(), batch["labels"].flatten())
                    monitor.watch_loss(loss)  # before the division, so that dY is also recorded in units of this loss
                    (loss / ACCUMULATED).backward()
                    total += loss.detach() / ACCUMULATED
                optimizer.step()
                optimizer.zero_grad()
                report(loss=total, lr=optimizer.param_groups[0]["lr"])
    if dist.get_rank() == 0:
        print(f"The record is in {output}; look at it with: tensorboard --logdir {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/fsdp2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    place = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    train(options.output, options.steps, options.interval, place)
    dist.destroy_process_group()

"""Train with ZeRO on any number of processes: `torchrun --nproc-per-node 2 recipes/deepspeed_zero.py`, or `deepspeed`.

Without a GPU, set DS_ACCELERATOR=cpu. The script then uses gloo and BF16.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

import deepspeed
import torch
from plain_loop import model
from text_windows import TextWindows
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from nemo_fp8_debug import Monitor

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 64, 4, 2


def configuration(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }


def train(output: str, steps: int, interval: int, stage: int) -> None:
    if not torch.cuda.is_available():
        # DeepSpeed would first compile shared-memory collectives, which takes longer than this run.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    gpt = model()
    # Use torch's optimizer, because DeepSpeed compiles its own at first use.
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    engine, optimizer, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=configuration(stage))
    text = TextWindows(MICRO_BATCH * MICRO_BATCHES * steps * torch.distributed.get_world_size(), SEQUENCE)
    data = DataLoader(text, batch_size=MICRO_BATCH, sampler=DistributedSampler(text, shuffle=False))

    # Create the monitor on every rank. You can also create it before deepspeed.initialize, or from `gpt` or `engine.module`.
    with closing(Monitor(engine, output, interval=interval)) as monitor:
        losses: list[torch.Tensor] = []
        for batch in data:
            if not losses:  # the micro-batches of a step form one sample
                monitor.begin_step(engine.global_steps)
            logits = engine(batch["tokens"].to(engine.device))
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].to(engine.device).flatten())
            losses.append(loss.detach())
            monitor.watch_loss(loss)  # measures the factor by which DeepSpeed multiplies gradients
            engine.backward(loss)
            last, loss_scale = engine.is_gradient_accumulation_boundary(), getattr(optimizer, "loss_scale", None)
            engine.step()  # this may change the loss scale
            if last:
                monitor.end_step(
                    loss=torch.stack(losses).mean(),
                    grad_norm=engine.get_global_grad_norm(),
                    lr=engine.get_lr()[0],
                    loss_scale=loss_scale,
                    skipped=int(not engine.was_step_applied()),
                )
                losses = []
    if torch.distributed.get_rank() == 0:
        print(f"The record is in {output}; look at it with: tensorboard --logdir {output}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/deepspeed_zero")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="stage of ZeRO")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes this
    options = parser.parse_args()
    train(options.output, options.steps, options.interval, options.stage)

"""DeepSpeed in float16, whose loss scale is too large at first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from nemo_fp8_debug import Monitor

STEPS, ACCUMULATED = 6, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).float().square().mean()


def train(rank: int, stage: int, folder: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": ACCUMULATED,
            "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    monitor = Monitor(engine, folder, interval=1, table_rows=0, on_error="raise") if folder else None
    losses = []
    for step in range(STEPS):
        if monitor:
            monitor.begin_step(step)
        skipped = engine.skipped_steps
        for i in range(ACCUMULATED):
            seed = torch.Generator().manual_seed(100 * step + 10 * i + rank)
            loss = engine(torch.randn(8, 16, generator=seed).half())
            engine.backward(loss)
            scale = engine.optimizer.loss_scale
            engine.step()
        losses.append(loss.item())
        if monitor:
            monitor.end_step(loss=loss, loss_scale=float(scale), skipped=engine.skipped_steps - skipped)
    if monitor:
        monitor.close()
    return {"losses": losses, "weights": [p.tolist() for p in model.parameters()]}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built
    type(get_accelerator()).is_fp16_supported = lambda self: True  # it is, but slow
    deepspeed.init_distributed("gloo")
    found = {
        stage: {"watched": train(rank, stage, folder / str(stage)), "plain": train(rank, stage, None)} for stage in (0, 1)
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()

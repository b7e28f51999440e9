"""Train with torchtitan's trainer and a monitor. All options are torchtitan's own, and the record is in torchtitan's dump
folder.

torchrun --nproc-per-node 8 recipes/torchtitan_trainer.py --module llama3
    --config llama3_debugmodel_float8 --training.disable_cuda_graphs
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

from nemo_fp8_debug import Monitor

#: sampling interval in steps
INTERVAL = 100


class MonitoredTrainer(Trainer):
    """A trainer that samples on every rank. A step is an optimizer step, with all of its accumulated batches."""

    def __init__(self, config: Trainer.Config, interval: int = INTERVAL, **options: Any) -> None:
        """
        Args:
            config: torchtitan's configuration. CUDA graphs must be off, because the replay of a CUDA graph runs no hooks.
            interval: sampling interval in steps.
            options: further options of Monitor.
        """
        if not config.training.disable_cuda_graphs:
            raise ValueError("CUDA graphs run no hooks, so layers cannot be sampled; add --training.disable_cuda_graphs")
        super().__init__(config)
        output = os.path.join(config.dump_folder, "fp8_debug")
        self.monitor = Monitor(self.model_parts, output, interval=interval, **options)
        self._losses: list[torch.Tensor] = []

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**batch)
        self._losses.append(loss.detach())
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self._losses = []
        with self.monitor.step(self.step) as report:
            super().train_step(data_iterator)
            # Each loss is a sum over this rank's tokens, divided by the number of tokens on all ranks of the mesh `loss`.
            ranks = self.parallel_dims.get_optional_mesh("loss")
            report(loss=torch.stack(self._losses).sum() * (ranks.size() if ranks else 1))

    def close(self) -> None:
        self.monitor.close()
        super().close()


if __name__ == "__main__":
    trainer = MonitoredTrainer(ConfigManager().parse_args())
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()

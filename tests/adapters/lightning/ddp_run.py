"""Lightning runs on two CPU processes, of which Lightning starts the second: `ddp_run.py FOLDER`, with a folder for each."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import ConfigError, FP8DebugCallback

WATCHED: dict[str, dict[str, Any]] = {
    "none": {},
    "watched": {"dump": ["layers.0"], "triggers": ["loss_spike"], "trigger_steps": 2, "dump_min_free_bytes": 0},
    "accumulated": {},
    "refused": {"output": "/proc/nothing/can/be/written/here"},
}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # The first rank's loss alone spikes.
        spike = 1e3 if self.global_step == 23 and self.global_rank == 0 else 1.0
        loss = self.layers(batch).square().mean() + spike
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(folder: Path, how: str) -> None:
    torch.manual_seed(0)
    callbacks = [FP8DebugCallback(interval=10, table_rows=0, **WATCHED[how])] if how != "none" else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=4 if how == "accumulated" else 1,
        logger=TensorBoardLogger(folder, name="", version="run"),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, result = Module(), {}
    try:
        trainer.fit(module, DataLoader(torch.randn(160, 4), batch_size=2))
    except ConfigError as error:
        result["refused"] = str(error)
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    result |= {"losses": module.losses, "weights": hashlib.sha256(weights).hexdigest()}
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for how in WATCHED:
        train(Path(sys.argv[1]) / how, how)

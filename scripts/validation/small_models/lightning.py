"""A small module under a plain Lightning trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    """Its loss tells which batch it was: batch i is all i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.log("train_loss", batch.mean())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(
    folder: Path, callbacks: list[pl.Callback], batches: int = 6, logger: Any = None, module: Any = None, **options: Any
) -> pl.Trainer:
    torch.manual_seed(0)
    data = [torch.full((4,), i + 1.0) for i in range(batches) for _ in range(2)]
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=logger if logger is not None else TensorBoardLogger(folder, name="", version="run"),
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        **options,
    )
    evaluated = {"val_dataloaders": DataLoader(data, batch_size=4)} if "val_check_interval" in options else {}
    trainer.fit(module or Module(), DataLoader(data, batch_size=2), **evaluated)
    return trainer

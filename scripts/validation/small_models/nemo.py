"""The GPT of recipes/nemo_gpt.py in a short run of real NeMo, on a CPU."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from nemo.collections import llm
from nemo_gpt import VARIANTS, model
from text import Text


class Losses(pl.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.values.append(float(trainer.callback_metrics["reduced_train_loss"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Losses:
        return self


def train(folder: Path, callbacks: list[pl.Callback], resume: Path | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    losses = Losses()
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=5,
        strategy=nl.MegatronStrategy(ckpt_async_save=False),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        callbacks=[*callbacks, losses],
        logger=TensorBoardLogger(folder, name="", version="run"),
        log_every_n_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    gpt: llm.GPTModel = model(VARIANTS["baseline"], 5, te=False)
    for name, value in options.items():
        setattr(gpt.config, name, value)
    trainer.fit(gpt, Text(sequence=32, micro_batch_size=2, global_batch_size=4), ckpt_path=resume)
    digest = hashlib.sha256()
    for parameter in gpt.parameters():
        digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
    return {"losses": losses.values, "weights": digest.hexdigest()}

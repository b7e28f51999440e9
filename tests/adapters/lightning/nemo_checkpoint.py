"""Trains the recipe's GPT by real NeMo for two steps and saves a NeMo 2 checkpoint, whole and its weights."""

from __future__ import annotations

from pathlib import Path

import nemo.lightning as nl
import torch
from nemo.lightning.io.pl import TrainerContext
from nemo_gpt import VARIANTS, model
from text import Text


def save(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        strategy=nl.MegatronStrategy(ckpt_async_save=False),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        logger=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    gpt = model(VARIANTS["reference"], 2, te=False)
    gpt.config.num_layers = 2
    trainer.fit(gpt, Text(sequence=32, micro_batch_size=2, global_batch_size=4))
    trainer.save_checkpoint(folder)
    TrainerContext.from_trainer(trainer).io_dump(folder / "context", yaml_attrs=["model"])
    weights = {name: value for name, value in gpt.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(weights, folder.with_suffix(".pt"))

"""What several callbacks ask a Lightning trainer."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn


def roots(trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[nn.Module]:
    """The model; under NeMo's MegatronStrategy the chunks of the pipeline."""
    chunks = getattr(trainer.strategy, "megatron_parallel", None)
    return list(chunks) if chunks is not None else [pl_module]


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether the next batch adds its gradients to this one's; under manual optimization each batch stands alone."""
    result: bool = trainer.fit_loop._should_accumulate()
    return result

"""Which loggers of a trainer get a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from ...errors import warn

#: classes whose run, or file beside theirs, can be written from another thread, and the plain names that mean them
_KNOWN = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet", "CSVLogger": None}


def with_loggers_of(trainer: pl.Trainer, asked: Sequence[Any]) -> list[Any]:
    """What is asked for, and the loggers of the trainer that are known; a plain name means the trainer's, if it has one.

    TensorBoard's have a recorder of their own. Others may not be made for calls from two threads, which a warning says.
    """
    own = [logger for logger in trainer.loggers if not isinstance(logger, TensorBoardLogger)]
    known = [logger for logger in own if _class_of(logger) and not any(logger is given for given in asked)]
    for logger in own:
        if trainer.is_global_zero and _class_of(logger) is None and not any(logger is given for given in asked):
            warn(
                f"{type(logger).__name__} gets nothing: it may not be made for calls from two threads. If it is, give it to "
                "the callback: loggers=[logger]"
            )
    names = {_KNOWN[_class_of(logger) or ""] for logger in known}
    return [*(item for item in asked if not (isinstance(item, str) and item in names)), *known]


def _class_of(logger: Logger) -> str | None:
    return next((kind.__name__ for kind in type(logger).__mro__ if kind.__name__ in _KNOWN), None)

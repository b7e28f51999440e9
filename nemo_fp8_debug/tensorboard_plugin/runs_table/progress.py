"""What a row of the table of runs tells beside the list: the recipe, and the loss that was written last."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from ...core.scale_sources import HIGH_PRECISION
from ...errors import hearing
from ...record.parts import PartDamagedError, PartGoneError, read_columns
from ...record.reader import read_fingerprint
from ...record.storage import Storage
from ..records.notes import quantization_of
from ..records.part_matrices import Index, Parts

#: parts of `steps` that are read for a loss, the newest first
_PARTS_READ = 4


def progress(parts: Parts, run: Storage) -> dict[str, Any]:
    """How far a run is and what it casts in.

    Returns:
        recipe: that its metrics are of; None: the record does not say. is_quantized: False where nothing is. loss, and
        loss_step: at which it was written; a loss that is not finite is None at a step. Both None where there is none.
    """
    index = parts.index(run)
    with hearing():
        fingerprint = read_fingerprint(run)
        step, loss = _last_loss(run, index)
    recipe = fingerprint.get("recipe")
    return {
        "recipe": recipe.get("measured_against") if isinstance(recipe, dict) else None,
        "is_quantized": quantization_of(parts, run, index, fingerprint) != HIGH_PRECISION,
        "loss": loss if loss is not None and np.isfinite(loss) else None,
        "loss_step": step,
    }


def _last_loss(run: Storage, index: Index) -> tuple[int | None, float | None]:
    newest = sorted(index.listed["steps"], key=lambda part: (part.attempt, part.last, part.merged), reverse=True)
    for part in newest[:_PARTS_READ]:
        try:
            rows = read_columns(run, "steps", part, ("attempt", "step", "loss"))[0]
        except (PartGoneError, PartDamagedError):
            continue
        losses = pl.DataFrame(pl.from_arrow(rows)).drop_nulls("loss").sort("step")
        if len(losses):
            return int(losses["step"][-1]), float(losses["loss"][-1])
    return None, None

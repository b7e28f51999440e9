"""How near the operands of a run are to limits that no healthy one passes, sample by sample: a warning before the loss."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl

from ...numerics.limits import MADE_UP
from ..comparison.compare import quantized, split_experts
from ..runs.blocks import in_parts, over_blocks
from ..runs.grid import Grid
from ..runs.run import Run
from .limits import COLUMNS, strengths, times_of_limits, with_limits


def early_warning(run: Run) -> pl.DataFrame:
    """The score of each sample, and the operand that it is of. It looks at that sample and the one before it, so it can be
    had while a run goes on; the trigger of the same name does.

    Operands in FP8 alone have limits; without any there are no scores.

    Returns:
        step, score (how many times its limit the farthest operand shows in both, or a third of what it shows in this one;
        above 1 is a warning), layer, role. The first samples, whose scales are made up, are left out.

    Example:
        >>> scores = early_warning(Run.read("runs/bad"))
        >>> scores.columns, scores["score"].max() > 1
        (['step', 'score', 'layer', 'role'], True)
    """
    limited = with_limits(quantized(run.metrics))
    judged = limited.among(split_experts(limited.tensors)[0])
    empty = pl.DataFrame(schema={"step": pl.Int64, "score": pl.Float64, "layer": pl.String, "role": pl.String})
    if judged.is_empty():
        return empty
    found = [rows for block in over_blocks(partial(in_parts, _farthest), judged, together=[COLUMNS]) for rows in block]
    # Of operands that are equally far the first counts.
    return pl.concat([empty, *found]).sort("step", -pl.col("score"), maintain_order=True).unique("step", maintain_order=True)


def _farthest(grid: Grid) -> pl.DataFrame:
    """step, score, layer, role: of each sample the operand that is the farthest."""
    times = strengths(times_of_limits(grid))[:, MADE_UP:]
    worst = np.argmax(times, axis=0)
    columns = {"step": grid.steps[MADE_UP:], "score": times[worst, np.arange(times.shape[1])]}
    return pl.DataFrame(columns, schema={"step": pl.Int64, "score": pl.Float64}).hstack(grid.tensors[worst.tolist()])

"""How near the operands of a run are to limits that no healthy one passes, sample by sample: a warning before the loss."""

from __future__ import annotations

import numpy as np
import polars as pl

from ...numerics.limits import MADE_UP
from ..comparison.compare import quantized, split_experts
from ..runs.grid import Grid
from ..runs.run import Run
from .rules.beyond import strengths, times_of_limits, with_limits


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
    grid = Grid.of_table(_tensors(with_limits(quantized(run.metrics))))
    times = strengths(times_of_limits(grid))[:, MADE_UP:]
    worst = np.argmax(times, axis=0) if len(times) else np.zeros(0, dtype=np.int64)
    operands = grid.tensors[worst.tolist()]
    columns = {"step": grid.steps[MADE_UP:], "score": times[worst, np.arange(times.shape[1])] if len(times) else []}
    return pl.DataFrame(columns, schema={"step": pl.Int64, "score": pl.Float64}).hstack(operands)


def _tensors(metrics: pl.DataFrame) -> pl.DataFrame:
    """Without the experts of which there is an aggregate."""
    return split_experts(metrics)[0]

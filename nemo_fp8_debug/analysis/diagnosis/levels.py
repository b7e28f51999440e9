"""How the level of operands moves from sample to sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import polars as pl

from ..runs.grid import Floats, Ints, stretches
from ..runs.metrics import Metrics

Result = TypeVar("Result")


class Level(NamedTuple):
    """A measure of how large the values of an operand are."""

    columns: Sequence[str]
    #: natural log, of rows in which all columns are above 0
    log: pl.Expr


ROOT_MEAN_SQUARE = Level(["mse", "relative_error"], 0.5 * pl.col("mse").log() - pl.col("relative_error").log())


def moves_of_levels(operands: Metrics, level: Level, together: Callable[[Floats], Result]) -> tuple[Ints, list[Result]]:
    """Steps at which any level is known, and what `together` makes of the moves from each to the next.

    Args:
        operands: T of them.
        together: float64 [T] -> what is to be known of it: by how much the natural log of each level moves; NaN where one
            of the two is not known.

    Example:
        >>> rows = {"layer": "fc1", "role": "input", "step": [0, 5, 10], "relative_error": 0.5, "mse": [1.0, 4.0, 4.0]}
        >>> steps, moves = moves_of_levels(
        ...     Metrics.of(pl.DataFrame(rows)), ROOT_MEAN_SQUARE, lambda moves: round(float(moves[0]), 2)
        ... )
        >>> steps.tolist(), moves
        ([0, 5, 10], [0.69, 0.0])
    """
    before, steps, moves = None, list[int](), list[Result]()
    for stretch in operands.over_steps(partial(_of_stretch, level, together)):
        if stretch.steps and before is not None:
            moves.append(together(stretch.first - before))
        steps += stretch.steps
        moves += stretch.moves
        before = stretch.last if stretch.steps else before
    return np.array(steps, dtype=np.int64), moves


@dataclass(frozen=True)
class _Stretch(Generic[Result]):
    """Steps that follow one another, what is known of the moves between them, and the levels at the first and the last."""

    steps: list[int]
    moves: list[Result]
    first: Floats
    last: Floats


def _of_stretch(level: Level, together: Callable[[Floats], Result], operands: Metrics) -> _Stretch[Result]:
    unknown = np.full(len(operands.tensors), np.nan)
    first, before, steps, moves = unknown, unknown, list[int](), list[Result]()
    for rows in operands.scan(level.columns):
        known = rows.filter(*(pl.col(name) > 0 for name in level.columns)).sort("step", maintain_order=True)
        of_rows = known.select("tensor", level=level.log.cast(pl.Float64))
        tensor, levels = of_rows["tensor"].to_numpy(), of_rows["level"].to_numpy()
        for step, here in stretches(known["step"].to_numpy()):
            now = unknown.copy()
            now[tensor[here]] = levels[here]
            moves += [together(now - before)] if steps else []
            first = first if steps else now
            steps.append(step)
            before = now
    return _Stretch(steps, moves, first, before)

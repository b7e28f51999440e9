"""How the sizes of weights move from sample to sample, from one pass over their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from ...runs.grid import Floats, Ints, stretches
from ...runs.metrics import Metrics
from ...runs.run import Run
from ...runs.source import Bools

#: log2 by which the range of a weight that learns moves, at the least: a step of BF16 is 2^-8, and decay moves it by less
_MOVES = 1e-3
#: share of layers that must agree on a fall, and the least number of them
_MOST, _FEWEST = 0.75, 3


@dataclass
class Standing:
    """Of each weight, since when it stands still, as far as its range tells; [T] each."""

    #: log2 of its range at its first and its last sample; NaN: it has none
    first: Floats
    last: Floats
    #: the first step of its last range, samples that have that one, and how often it came to another
    since: Ints
    samples: Ints
    moves: Ints

    @classmethod
    def of(cls, tensors: int) -> Standing:
        """Of weights that have no sample yet."""
        none = np.zeros(tensors, dtype=np.int64)
        return cls(np.full(tensors, np.nan), np.full(tensors, np.nan), none, none.copy(), none.copy())

    def add(self, step: int, of_range: Floats) -> None:
        """A sample: log2 of the largest by the smallest value that is not 0; NaN: it has none of that weight."""
        there = np.isfinite(of_range)
        moved, new = np.abs(of_range - self.last) > _MOVES, there & np.isnan(self.last)
        self.since[moved | new] = step
        self.samples = np.where(moved | new, 1, self.samples + there)
        self.moves += moved
        self.first, self.last = np.where(new, of_range, self.first), np.where(there, of_range, self.last)

    def __add__(self, later: Standing) -> Standing:
        """This, and what comes later."""
        there = np.isfinite(later.last)
        moved = np.abs(later.first - self.last) > _MOVES
        goes_on = np.isfinite(self.last) & ~moved & (later.moves == 0)
        return Standing(
            np.where(np.isfinite(self.first), self.first, later.first),
            np.where(there, later.last, self.last),
            np.where(there & ~goes_on, later.since, self.since),
            np.where(there & ~goes_on, later.samples, self.samples + later.samples),
            self.moves + later.moves + moved,
        )


@dataclass(frozen=True)
class Levels:
    """Of the weights of a run."""

    #: sampled, int64 [S]
    steps: Ints
    #: [S - 1]: by how much the log of the root mean square of most weights falls up to the next; 0 where few are known
    falls: Floats
    #: by layer, [T]
    layers: pl.Series
    standing: Standing

    def still(self, samples: int) -> Bools:
        """[T]: those that have moved, and then have not for so many samples, up to the end."""
        return (self.standing.moves > 1) & (self.standing.samples >= samples)


def levels_of(run: Run) -> Levels:
    """Of the weights of a run."""
    weights = run.metrics.with_role("weight")
    standing, before = Standing.of(len(weights.tensors)), None
    steps, falls = list[int](), list[float]()
    for stretch in weights.over_steps(_of_stretch):
        if stretch.steps and before is not None:
            falls.append(_fall_of_most(before - stretch.first))
        steps += stretch.steps
        falls += stretch.falls
        before = stretch.last if stretch.steps else before
        standing += stretch.standing
    return Levels(np.array(steps, dtype=np.int64), np.array(falls), weights.tensors["layer"], standing)


@dataclass
class _Stretch:
    """Steps that follow one another, the falls between them, and the level of each weight at the first and the last."""

    steps: list[int]
    falls: list[float]
    first: Floats
    last: Floats
    standing: Standing


def _of_stretch(weights: Metrics) -> _Stretch:
    unknown = np.full(len(weights.tensors), np.nan)
    found = _Stretch([], [], unknown, unknown, Standing.of(len(unknown)))
    for rows in weights.scan(["relative_error", "mse", "dynamic_range_log2"]):
        ordered = rows.sort("step", maintain_order=True)
        for step, of_range in _by_step(ordered.select("tensor", "step", value="dynamic_range_log2"), unknown):
            found.standing.add(step, of_range)
        known = ordered.filter(pl.col("relative_error") > 0, pl.col("mse") > 0)
        level = 0.5 * pl.col("mse").log() - pl.col("relative_error").log()
        for step, levels in _by_step(known.select("tensor", "step", value=level), unknown):
            if found.steps:
                found.falls.append(_fall_of_most(found.last - levels))
            else:
                found.first = levels
            found.steps.append(step)
            found.last = levels
    return found


def _by_step(rows: pl.DataFrame, unknown: Floats) -> Iterator[tuple[int, Floats]]:
    """Each step, and the value of each weight; where it has none, what is in its place in `unknown`."""
    tensor, value = rows["tensor"].to_numpy(), rows["value"].to_numpy()
    for step, here in stretches(rows["step"].to_numpy()):
        of_step = unknown.copy()
        of_step[tensor[here]] = value[here]
        yield step, of_step


def _fall_of_most(falls: Floats) -> float:
    """Most layers shrink by at least as much as the one that three in four surpass."""
    enough = np.isfinite(falls).sum() >= _FEWEST
    return float(np.nanquantile(falls, 1 - _MOST)) if enough else 0.0

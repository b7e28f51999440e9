"""Measures raw losses, independently of the analysis that verdicts come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

Floats = npt.NDArray[np.float64]
#: losses of a block, whose means are taken for independent
_BLOCK = 5
#: standard errors within which two numbers agree: a chance of 1 in 370 for Gaussian noise
SURE = 3.0
#: parts of the steps over which a loss ends: what verdicts average over, and the last tenth
ENDS = (0.2, 0.1)
#: share of losses that may lie on the other side of zero before percents are of the range of losses
_TAIL = 0.01
#: part of its range, within which a loss ends near zero
_NEAR = 0.1


@dataclass(frozen=True)
class Losses:
    """Losses by step, ascending; one that is not a number is infinite."""

    steps: npt.NDArray[np.int64]
    values: Floats

    @classmethod
    def of(cls, losses: Mapping[int, float | None] | Sequence[float | None]) -> Losses:
        """Take losses by step, or of steps 0, 1, 2, ..."""
        by_step = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
        steps = np.array(sorted(by_step), dtype=np.int64)
        values = np.array([math.inf if (loss := by_step[int(step)]) is None else loss for step in steps], dtype=np.float64)
        return cls(steps, np.where(np.isfinite(values), values, np.inf))

    @property
    def window(self) -> int:
        """Return half the width over which a verdict smooths losses, a sixth of the run: no step of them is surer."""
        return max(2, len(self.values) // 12)

    @property
    def lost_from(self) -> int | None:
        """Return the first step from which no loss is finite any longer; None: the last one is."""
        finite = np.flatnonzero(np.isfinite(self.values))
        if not len(self.values) or (len(finite) and finite[-1] == len(self.values) - 1):
            return None
        return int(self.steps[finite[-1] + 1 if len(finite) else 0])

    @property
    def first_lost(self) -> int | None:
        """Return the first step whose loss is not finite; None: there is none."""
        lost = np.flatnonzero(~np.isfinite(self.values))
        return int(self.steps[lost[0]]) if len(lost) else None

    def at(self, step: int) -> float | None:
        """Return the loss of a step; None: it has none."""
        place = int(np.searchsorted(self.steps, step))
        return float(self.values[place]) if place < len(self.steps) and self.steps[place] == step else None

    def between(self, first: float, end: float) -> Floats:
        """Return finite losses of the steps from `first` on and before `end`."""
        values = self.values[(self.steps >= first) & (self.steps < end)]
        return values[np.isfinite(values)]

    def last(self, part: float) -> Floats:
        """Return finite losses of the last part of the steps, of ten at least."""
        values = self.values[-max(round(part * len(self.values)), 10) :]
        return values[np.isfinite(values)]

    @cached_property
    def lowest(self) -> tuple[int, float]:
        """Return where the mean over a window is lowest, and that mean."""
        means = np.convolve(self.values, np.ones(self.window) / self.window, "valid")
        place = int(np.argmin(means))
        return int(self.steps[place]), float(means[place])

    @property
    def whole(self) -> float | None:
        """Return what 100% are if losses lie on both sides of zero and end near it: their range. None: they do not."""
        finite = self.values[np.isfinite(self.values)]
        low, high = np.quantile(finite, (_TAIL, 1 - _TAIL)) if len(finite) else (0.0, 0.0)
        ends_near = abs(float(self.last(0.1).mean())) <= _NEAR * (high - low) if len(finite) else False
        return float(high - low) if low < 0 < high and ends_near else None


@dataclass(frozen=True)
class Apart:
    """How far a run's loss lies above another's, in percent, with its standard error."""

    percent: float
    error: float

    def __str__(self) -> str:
        return f"{self.percent:+.3g}% (error {self.error:.2g})"

    @property
    def reach(self) -> float:
        """Return how far another measurement may lie from this one."""
        return SURE * self.error

    @property
    def is_above(self) -> bool:
        """Return True if it is surely above zero."""
        return self.percent > self.reach

    @property
    def is_below(self) -> bool:
        """Return True if it is surely below zero."""
        return self.percent < -self.reach


@dataclass(frozen=True)
class Pair:
    """Losses of two runs at the steps that both have."""

    steps: npt.NDArray[np.int64]
    mine: Floats
    theirs: Floats
    whole: float | None

    @classmethod
    def of(cls, mine: Losses, theirs: Losses) -> Pair:
        """Pair losses by step."""
        steps, here, there = np.intersect1d(mine.steps, theirs.steps, return_indices=True)
        return cls(steps, mine.values[here], theirs.values[there], theirs.whole)

    def measure_end(self, part: float) -> Apart | None:
        """Return the gap over the last part of the steps; None: fewer than ten are finite."""
        count = max(round(part * len(self.steps)), 20)
        return self._measure(slice(max(len(self.steps) - count, 0), None))

    def measure_between(self, first: float, end: float) -> Apart | None:
        """Return the gap over the steps from `first` on and before `end`; None: fewer than ten are finite."""
        here = np.flatnonzero((self.steps >= first) & (self.steps < end))
        return self._measure(slice(here[0], here[-1] + 1)) if len(here) else None

    def _measure(self, here: slice) -> Apart | None:
        finite = np.isfinite(self.mine[here]) & np.isfinite(self.theirs[here])
        mine, theirs = self.mine[here][finite], self.theirs[here][finite]
        if len(mine) < 2 * _BLOCK or not theirs.mean():
            return None
        level = self.whole or abs(float(theirs.mean()))
        scaled = theirs if self.whole else theirs * float(mine.mean() / theirs.mean())
        return Apart(100 * float(mine.mean() - theirs.mean()) / level, 100 * compute_error(mine - scaled) / level)


def compute_error(values: Floats) -> float:
    """Return the standard error of a mean, from means of blocks: neighbors are alike.

    Few blocks tell their scatter badly, so that error is widened as Student's t is.
    """
    count = len(values) // _BLOCK
    if count < 2:
        return math.inf
    blocks = values[len(values) - count * _BLOCK :].reshape(count, _BLOCK).mean(axis=1)
    widened = math.sqrt((count - 1) / max(count - 3, 0.5))
    return float(blocks.std(ddof=1)) / math.sqrt(count) * widened


def measure_rise(before: Floats, after: Floats) -> Apart | None:
    """Return how far the mean of some losses lies above that of others, in percent of these; None: there are too few."""
    if min(len(before), len(after)) < 3 or not before.mean():
        return None
    errors = [float(each.std(ddof=1)) / math.sqrt(len(each)) for each in (before, after)]
    level = abs(float(before.mean()))
    return Apart(100 * float(after.mean() - before.mean()) / level, 100 * math.hypot(*errors) / level)


@dataclass(frozen=True)
class Recorded:
    """What the files of a record hold, as they lie there."""

    losses: Losses
    #: sampled steps, ascending
    sampled: tuple[int, ...]
    layers: frozenset[str]

    @classmethod
    def read(cls, record: Path) -> Recorded:
        """Read the files of a record, in a folder or below it. Of a step that was taken twice, the later attempt counts."""
        rows = pl.concat(
            [pl.read_parquet(path).select("attempt", "step", "loss") for path in sorted(record.glob("**/steps/*.parquet"))],
            how="vertical_relaxed",
        )
        last = rows.drop_nulls("loss").sort("attempt", "step").unique("step", keep="last")
        tables = [pl.scan_parquet(path) for path in sorted(record.glob("**/*.parquet")) if path.parent.name != "steps"]
        layers = [table.select("layer").unique().collect()["layer"] for table in tables if "layer" in table.collect_schema()]
        metrics = [pl.read_parquet(path, columns=["step"]) for path in sorted(record.glob("**/metrics/*.parquet"))]
        sampled = pl.concat(metrics)["step"].unique().sort().to_list() if metrics else []
        named = frozenset(layer for each in layers for layer in each.drop_nulls().to_list())
        return cls(Losses.of(dict(last.select("step", "loss").rows())), tuple(sampled), named)

"""Losses of two runs laid side by side, and whether both saw the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .curve import LossCurve
from .smoothing import running_median

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: part of the steps of the run with fewer that both must have, or else means over stretches of steps are compared
_SHARED = 0.9
#: correlation of what the losses move by from step to step that shows the same batches: the least, and in standard errors
_ALIKE, _ERRORS = 0.1, 4.0


@dataclass(frozen=True)
class Aligned:
    """Losses of a run and of a baseline at the same places; non-finite ones are infinite."""

    #: steps, or the first step of each stretch
    steps: Ints
    run: Floats
    baseline: Floats
    #: steps from one place to the next
    spacing: int
    #: of what either loss moves by from one place to the next; NaN if there are too few
    correlation: float
    #: what 100% of a gap are; None: the baseline's level
    range: float | None = None

    @property
    def paired(self) -> bool:
        """Whether the noise of the two is the same in part, as of runs that see the same batches in the same order."""
        least = max(_ALIKE, _ERRORS / max(len(self.steps), 1) ** 0.5)
        return bool(self.correlation > least)

    def last(self, part: float, after: int | None, least: int) -> Aligned:
        """The last part of the places, or those after a step; at least so many, if there are as many."""
        if after is None:
            n = max(round(part * len(self.steps)), min(least, len(self.steps)))
            kept = slice(len(self.steps) - n, None)
        else:
            kept = slice(int(np.searchsorted(self.steps, after, side="right")), None)
        return replace(self, steps=self.steps[kept], run=self.run[kept], baseline=self.baseline[kept])


def align(run: LossCurve, baseline: LossCurve) -> Aligned:
    """Where both have losses: at the steps of both, or, if they share few, as means over stretches that both cover.

    Example:
        >>> import polars as pl
        >>> coarse = LossCurve.of(pl.DataFrame({"step": [0, 10, 20, 30], "loss": [4.0, 3.0, 2.0, 1.0]}))
        >>> fine = LossCurve.of(pl.DataFrame({"step": range(40), "loss": [2.0] * 40}))
        >>> align(coarse, fine).steps.tolist()
        [0, 10, 20, 30]
    """
    shared, mine, theirs = np.intersect1d(run.steps, baseline.steps, return_indices=True)
    first = max(run.steps[0], baseline.steps[0]) if len(run.steps) and len(baseline.steps) else 0
    last = min(run.steps[-1], baseline.steps[-1]) if len(run.steps) and len(baseline.steps) else -1
    fewest = min(int(((c.steps >= first) & (c.steps <= last)).sum()) for c in (run, baseline))
    spacing = max(_spacing(run.steps), _spacing(baseline.steps))
    if len(shared) >= _SHARED * fewest:
        steps, losses = shared.astype(np.int64), (run.losses[mine], baseline.losses[theirs])
    else:
        edges = np.arange(first, last + 1, spacing)
        means = [_means(curve, edges, spacing) for curve in (run, baseline)]
        both = ~np.isnan(means[0]) & ~np.isnan(means[1])
        steps, losses = edges[both].astype(np.int64), (means[0][both], means[1][both])
    return Aligned(steps, *losses, spacing, _correlation(*losses), baseline.range)


def _spacing(steps: Ints) -> int:
    return max(1, round(float(np.median(np.diff(steps))))) if len(steps) > 1 else 1


def _means(curve: LossCurve, edges: Ints, width: int) -> Floats:
    """Mean loss of each stretch of `width` steps; NaN where it has none."""
    at = (curve.steps - edges[0]) // width
    kept = (curve.steps >= edges[0]) & (at < len(edges))
    sums = np.bincount(at[kept], curve.losses[kept], len(edges))
    counts = np.bincount(at[kept], minlength=len(edges))
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _correlation(run: Floats, baseline: Floats) -> float:
    """Of the moves from place to place, less what they are around there: a loss that falls steeply moves as any other does.
    Large ones, as of spikes, count as much as others (ranks)."""
    finite = np.isfinite(run) & np.isfinite(baseline)
    moves = [np.diff(losses[finite]) for losses in (run, baseline)]
    if len(moves[0]) < 8:
        return float("nan")
    mine, theirs = (_ranks(each - running_median(each, 5)) for each in moves)
    with np.errstate(invalid="ignore"):  # of losses that do not move
        return float(np.corrcoef(mine, theirs)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Of equal ones the same: their order says nothing."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return ranks

"""Metrics of runs laid out by tensor and step, which samples of two runs belong together, and medians of such metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: what tells a tensor
KEY = ["layer", "role"]


@dataclass(frozen=True)
class Grid:
    """Metrics of a run by tensor and step."""

    #: T tensors, a row each: layer, role
    tensors: pl.DataFrame
    #: int64 [S]: sampled
    steps: Ints
    _metrics: pl.DataFrame
    #: int64 [T, S]: the row of `_metrics` that each place has, or how many rows there are where it has none
    _row: Ints

    @classmethod
    def of_table(cls, metrics: pl.DataFrame) -> Grid:
        """All tensors of a `metrics` table, in their order."""
        # Grouped as codes: the names of all rows are looked at once.
        names = metrics.select(pl.col(KEY).cast(pl.Categorical)).with_row_index("row")
        rows = names.group_by(KEY, maintain_order=True).agg("row")
        steps = metrics["step"].unique().sort().to_numpy()
        row = rows["row"].explode().to_numpy().astype(np.int64)
        tensor = np.repeat(np.arange(len(rows)), rows["row"].list.len().to_numpy())
        grid = np.full((len(rows), len(steps)), len(metrics))
        grid[tensor, np.searchsorted(steps, metrics["step"].to_numpy())[row]] = row
        return cls(rows.select(pl.col(KEY).cast(pl.String)), steps, metrics, grid)

    def among(self, tensors: pl.DataFrame) -> Grid:
        """Some of its tensors, in the order of theirs, and the steps that have any of them."""
        of_all = self.tensors.with_row_index("at")
        row = self._row[tensors.join(of_all, on=KEY, how="left", maintain_order="left")["at"].to_numpy()]
        sampled = (row < len(self._metrics)).any(axis=0)
        return replace(self, tensors=tensors, steps=self.steps[sampled], _row=row[:, sampled])

    def at(self, samples: Ints) -> Grid:
        """Some of its samples, by their places."""
        return replace(self, steps=self.steps[samples], _row=self._row[:, samples])

    def over(self, steps: Ints) -> Grid:
        """The same over more steps, its own among them; without a row at the others."""
        row = np.full((len(self.tensors), len(steps)), len(self._metrics))
        row[:, np.searchsorted(steps, self.steps)] = self._row
        return replace(self, steps=steps, _row=row)

    def of(self, metric: str) -> Floats:
        """[T, S], NaN where there is none or it was not read; `nonfinite`: 1 where any value is NaN or infinite, else 0."""
        if metric == "nonfinite":
            run = self.of("nan") + self.of("inf")
            return np.where(np.isnan(run), np.nan, run > 0)
        if metric not in self._metrics.columns:
            return np.full(self._row.shape, np.nan)
        values: Floats = np.append(self._metrics[metric].cast(pl.Float64).to_numpy(), np.nan)[self._row]
        return values

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T, S]: whether there is a row."""
        found: npt.NDArray[np.bool_] = self._row < len(self._metrics)
        return found


def in_common(baseline: Grid, run: Grid) -> tuple[Grid, Grid]:
    """Both over the tensors that both have, in the order of the first."""
    tensors = baseline.tensors.join(run.tensors, on=KEY, how="semi", maintain_order="left")
    return baseline.among(tensors), run.among(tensors)


@dataclass(frozen=True)
class Paired:
    """Samples of two runs that belong together: places in the steps of each, int64 [P]."""

    baseline: Ints
    run: Ints

    @classmethod
    def of(cls, baseline: Ints, run: Ints) -> Paired:
        """Each the other's nearest, and no farther apart than half the interval of the run that samples less often.

        Where the runs have steps in common these are the pairs, whatever either samples besides.
        """
        if not len(baseline) or not len(run):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        nearest = _nearest(baseline, run, later=True)
        # Between two equally near, one run looks ahead and the other back, so that a shift by half an interval pairs all.
        mutual = _nearest(run, baseline, later=False)[nearest] == np.arange(len(baseline))
        close = np.abs(run[nearest] - baseline) <= max(interval_of(baseline), interval_of(run)) / 2
        kept = np.flatnonzero(mutual & close)
        return cls(kept, nearest[kept])

    def __len__(self) -> int:
        return len(self.baseline)

    def last(self, share: float) -> Paired:
        """The later ones, one at least."""
        n = max(1, round(len(self) * share))
        return Paired(self.baseline[-n:], self.run[-n:])


def _nearest(of: Ints, among: Ints, later: bool) -> Ints:
    """Storage of the nearest step; of two the later or the earlier."""
    right = np.clip(np.searchsorted(among, of), 0, len(among) - 1)
    left = np.maximum(right - 1, 0)
    before, after = np.abs(of - among[left]), np.abs(among[right] - of)
    return np.where(before < after if later else before <= after, left, right)


def interval_of(steps: Ints) -> float:
    """Steps between samples, the median; 0 where there is one at most."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0


def median(values: Floats) -> Floats:
    """[T, S] -> [T]: NaN left out, between two in the middle their mean; NaN where there is nothing else."""
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], np.nan)
    count = (~np.isnan(values)).sum(-1)
    if (count == values.shape[-1]).all():
        whole: Floats = np.median(values, axis=-1)
        return whole
    ordered = np.sort(values, axis=-1)  # NaN last
    rows = np.arange(len(values))
    lower, upper = (ordered[rows, np.maximum(count - by, 0) // 2] for by in (1, 0))
    result: Floats = np.where(count > 0, (lower + upper) / 2, np.nan)
    return result


def lower_median(values: Floats) -> Floats:
    """Over the last axis, NaN left out, the lower of two in the middle; NaN where there is nothing else."""
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], np.nan)
    if not np.isnan(values).any():
        middle_of_all = (values.shape[-1] - 1) // 2
        whole: Floats = np.partition(values, middle_of_all, axis=-1)[..., middle_of_all]
        return whole
    ordered = np.sort(values, axis=-1)  # NaN last
    count = (~np.isnan(values)).sum(-1)
    middle = np.maximum(count - 1, 0) // 2
    result: Floats = np.take_along_axis(ordered, middle[..., None], -1)[..., 0]
    return result

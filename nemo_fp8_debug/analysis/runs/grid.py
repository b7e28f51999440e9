"""Figures of runs laid out by tensor and step, which samples of two runs belong together, and medians of such figures."""

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
    """Figures of a run by tensor and step."""

    #: T tensors, a row each: layer, role
    tensors: pl.DataFrame
    #: int64 [S]: sampled
    steps: Ints
    _figures: pl.DataFrame
    #: int64 [T, S]: the row of `_figures` that each place has, or how many rows there are where it has none
    _row: Ints

    @classmethod
    def of_table(cls, figures: pl.DataFrame) -> Grid:
        """All tensors of a `figures` table, in their order."""
        # Grouped as codes: the names of all rows are looked at once.
        names = figures.select(pl.col(KEY).cast(pl.Categorical)).with_row_index("row")
        rows = names.group_by(KEY, maintain_order=True).agg("row")
        steps = figures["step"].unique().sort().to_numpy()
        row = rows["row"].explode().to_numpy().astype(np.int64)
        tensor = np.repeat(np.arange(len(rows)), rows["row"].list.len().to_numpy())
        grid = np.full((len(rows), len(steps)), len(figures))
        grid[tensor, np.searchsorted(steps, figures["step"].to_numpy())[row]] = row
        return cls(rows.select(pl.col(KEY).cast(pl.String)), steps, figures, grid)

    def among(self, tensors: pl.DataFrame) -> Grid:
        """Some of its tensors, in the order of theirs, and the steps that have any of them."""
        of_all = self.tensors.with_row_index("at")
        row = self._row[tensors.join(of_all, on=KEY, how="left", maintain_order="left")["at"].to_numpy()]
        sampled = (row < len(self._figures)).any(axis=0)
        return replace(self, tensors=tensors, steps=self.steps[sampled], _row=row[:, sampled])

    def at(self, samples: Ints) -> Grid:
        """Some of its samples, by their places."""
        return replace(self, steps=self.steps[samples], _row=self._row[:, samples])

    def of(self, figure: str) -> Floats:
        """[T, S], NaN where there is none; `nonfinite`: 1 where any value is NaN or infinite, else 0."""
        if figure == "nonfinite":
            bad = self.of("nan") + self.of("inf")
            return np.where(np.isnan(bad), np.nan, bad > 0)
        values: Floats = np.append(self._figures[figure].cast(pl.Float64).to_numpy(), np.nan)[self._row]
        return values

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T, S]: whether there is a row."""
        found: npt.NDArray[np.bool_] = self._row < len(self._figures)
        return found


def in_common(good: Grid, bad: Grid) -> tuple[Grid, Grid]:
    """Both over the tensors that both have, in the order of the first."""
    tensors = good.tensors.join(bad.tensors, on=KEY, how="semi", maintain_order="left")
    return good.among(tensors), bad.among(tensors)


@dataclass(frozen=True)
class Paired:
    """Samples of two runs that belong together: places in the steps of each, int64 [P]."""

    good: Ints
    bad: Ints

    @classmethod
    def of(cls, good: Ints, bad: Ints) -> Paired:
        """Each the other's nearest, and no farther apart than half the interval of the run that samples less often.

        Where the runs have steps in common these are the pairs, whatever either samples besides.
        """
        if not len(good) or not len(bad):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        nearest = _nearest(good, bad, later=True)
        # Between two equally near, one run looks ahead and the other back, so that a shift by half an interval pairs all.
        mutual = _nearest(bad, good, later=False)[nearest] == np.arange(len(good))
        close = np.abs(bad[nearest] - good) <= max(_interval(good), _interval(bad)) / 2
        kept = np.flatnonzero(mutual & close)
        return cls(kept, nearest[kept])

    def __len__(self) -> int:
        return len(self.good)

    def last(self, share: float) -> Paired:
        """The later ones, one at least."""
        n = max(1, round(len(self) * share))
        return Paired(self.good[-n:], self.bad[-n:])


def _nearest(of: Ints, among: Ints, later: bool) -> Ints:
    """Place of the nearest step; of two the later or the earlier."""
    right = np.clip(np.searchsorted(among, of), 0, len(among) - 1)
    left = np.maximum(right - 1, 0)
    before, after = np.abs(of - among[left]), np.abs(among[right] - of)
    return np.where(before < after if later else before <= after, left, right)


def _interval(steps: Ints) -> float:
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

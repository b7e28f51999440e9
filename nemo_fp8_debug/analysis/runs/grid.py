"""Metrics of runs laid out by tensor and step, which samples of two runs belong together, and medians of such metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: what tells a tensor
KEY = ["layer", "role"]
#: tensors times steps that are looked at at once: 1 MiB of values, so that what is made of them stays near the core
_CELLS = 1 << 17


class OperandColumns(Protocol):
    """Metrics by operand and step, read as they are asked for."""

    def __getitem__(self, name: str) -> Floats:
        """[T, S]: NaN where there is no row, or no value; and `nonfinite`."""

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T, S]: whether there is a row."""


@dataclass(frozen=True)
class Grid:
    """Metrics of a run by tensor and step."""

    #: T tensors, a row each: layer, role
    tensors: pl.DataFrame
    #: int64 [S]: sampled
    steps: Ints
    _columns: OperandColumns
    #: int64 [T], [S]: places in the columns
    _tensor: Ints
    _sample: Ints

    @classmethod
    def of(cls, tensors: pl.DataFrame, steps: Ints, columns: OperandColumns) -> Grid:
        """All of these columns."""
        return cls(tensors, steps, columns, np.arange(len(tensors)), np.arange(len(steps)))

    def rows(self, some: slice | Ints) -> Grid:
        """Some of its tensors, by their places, and all steps."""
        return replace(self, tensors=self.tensors[some], _tensor=self._tensor[some])

    def among(self, tensors: pl.DataFrame) -> Grid:
        """Some of its tensors, in the order of theirs, and the steps that have any of them."""
        of_all = self.tensors.with_row_index("at")
        at = tensors.join(of_all, on=KEY, how="left", maintain_order="left")["at"].to_numpy()
        found = replace(self, tensors=tensors, _tensor=self._tensor[at])
        return found.at(np.flatnonzero(found.sampled.any(axis=0)))

    def at(self, samples: Ints) -> Grid:
        """Some of its samples, by their places."""
        return replace(self, steps=self.steps[samples], _sample=self._sample[samples])

    def over(self, steps: Ints) -> Grid:
        """The same over more steps, its own among them; without a row at the others."""
        sample = np.full(len(steps), -1)
        sample[np.searchsorted(steps, self.steps)] = self._sample
        return replace(self, steps=steps, _sample=sample)

    def metric(self, name: str) -> Floats:
        """[T, S], NaN where it is not recorded; `nonfinite`: 1 where any value is NaN or infinite, else 0."""
        return self._some(self._columns[name], np.nan)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T, S]: whether there is a row."""
        return self._some(self._columns.sampled, False)

    def _some(self, values: npt.NDArray[Any], missing: float) -> npt.NDArray[Any]:
        """A copy of its tensors and samples."""
        absent = self._sample < 0
        if not absent.any():
            return np.array(values[_span(self._tensor)][:, _span(self._sample)], order="C")
        found = np.full((len(self._tensor), len(absent)), missing, dtype=values.dtype)
        found[:, ~absent] = values[_span(self._tensor)][:, self._sample[~absent]]
        return found

    def parts(self) -> list[slice]:
        """Its tensors, as many at a time as intermediate results should have."""
        at_once = max(1, _CELLS // max(len(self.steps), 1))
        return [slice(first, first + at_once) for first in range(0, max(len(self.tensors), 1), at_once)]


def _span(places: Ints) -> slice | Ints:
    """Places as a slice if they follow one another: that copies no more than it has to."""
    if len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


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
        close = np.abs(run[nearest] - baseline) <= max(measure_interval(baseline), measure_interval(run)) / 2
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


def measure_interval(steps: Ints) -> float:
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


def find_stretches(places: Ints) -> Iterator[tuple[int, slice]]:
    """Each place that follows itself, and where that is."""
    ends = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else [0]
    for first, end in itertools.pairwise(ends):
        yield int(places[first]), slice(first, end)

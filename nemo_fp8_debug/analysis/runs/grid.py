"""Metrics of runs by tensor and step, pairs of samples of two runs, and medians of metrics."""

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

#: columns that identify a tensor
KEY = ["layer", "role"]
#: number of values (tensors times steps) in one part: 1 MiB, so that intermediate results stay in the cache
_CELLS = 1 << 17


class OperandColumns(Protocol):
    """Metrics by operand and step. Each column is read when it is first used."""

    def __getitem__(self, name: str) -> Floats:
        """Return a metric or `nonfinite`, [T, S]; NaN without a value."""

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Return whether each tensor was sampled at each step, [T, S]."""


@dataclass(frozen=True)
class MetricGrid:
    """Metrics of a run by tensor and step."""

    #: layer and role of T tensors, one row for each tensor
    tensors: pl.DataFrame
    #: sampled steps, int64 [S]
    steps: Ints
    _columns: OperandColumns
    #: indices in the columns, int64 [T] and [S]
    _tensor: Ints
    _sample: Ints

    @classmethod
    def from_columns(cls, tensors: pl.DataFrame, steps: Ints, columns: OperandColumns) -> MetricGrid:
        """Return a grid of all tensors and all steps."""
        return cls(tensors, steps, columns, np.arange(len(tensors)), np.arange(len(steps)))

    def select_tensors_by_index(self, some: slice | Ints) -> MetricGrid:
        """Return the grid of some tensors, given by index, with all steps."""
        return replace(self, tensors=self.tensors[some], _tensor=self._tensor[some])

    def select_tensors(self, tensors: pl.DataFrame) -> MetricGrid:
        """Return the grid of some tensors, in the order of `tensors`. Keep the steps at which any of these tensors was
        sampled.
        """
        of_all = self.tensors.with_row_index("at")
        at = tensors.join(of_all, on=KEY, how="left", maintain_order="left")["at"].to_numpy()
        found = replace(self, tensors=tensors, _tensor=self._tensor[at])
        return found.select_samples(np.flatnonzero(found.sampled.any(axis=0)))

    def select_samples(self, samples: Ints) -> MetricGrid:
        """Return the grid of some samples, given by index."""
        return replace(self, steps=self.steps[samples], _sample=self._sample[samples])

    def extend_steps(self, steps: Ints) -> MetricGrid:
        """Return the grid over more steps, which include all of its own steps. The added steps have no rows."""
        sample = np.full(len(steps), -1)
        sample[np.searchsorted(steps, self.steps)] = self._sample
        return replace(self, steps=steps, _sample=sample)

    def read_metric(self, name: str) -> Floats:
        """Return a metric, [T, S], NaN if not recorded. `nonfinite` is 1 if any value is NaN or infinite, else 0."""
        return self._some(self._columns[name], np.nan)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Return whether each tensor was sampled at each step, [T, S]."""
        return self._some(self._columns.sampled, False)

    def _some(self, values: npt.NDArray[Any], missing: float) -> npt.NDArray[Any]:
        """Return a copy of the values of these tensors and samples."""
        absent = self._sample < 0
        if not absent.any():
            return np.array(values[_span(self._tensor)][:, _span(self._sample)], order="C")
        found = np.full((len(self._tensor), len(absent)), missing, dtype=values.dtype)
        found[:, ~absent] = values[_span(self._tensor)][:, self._sample[~absent]]
        return found

    def slice_tensors(self) -> list[slice]:
        """Return slices of the tensors that are small enough for intermediate results to stay in the cache."""
        at_once = max(1, _CELLS // max(len(self.steps), 1))
        return [slice(first, first + at_once) for first in range(0, max(len(self.tensors), 1), at_once)]


def _span(places: Ints) -> slice | Ints:
    """If indices are consecutive, return a slice, because a slice needs no copy."""
    if len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


@dataclass(frozen=True)
class SamplePairs:
    """Pairs of samples of two runs, as indices in each run's steps, int64 [P]."""

    baseline: Ints
    run: Ints

    @classmethod
    def pair_nearest(cls, baseline: Ints, run: Ints) -> SamplePairs:
        """Pair two samples if each is the nearest sample to the other, and they are at most half the longer sampling
        interval apart.

        Steps that both runs sampled always form pairs.
        """
        if not len(baseline) or not len(run):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        nearest = _nearest(baseline, run, later=True)
        # If two samples are equally near, choose the later sample for one run and the earlier sample for the other run. So
        # all samples are paired if the runs are shifted by half an interval.
        mutual = _nearest(run, baseline, later=False)[nearest] == np.arange(len(baseline))
        close = (
            np.abs(run[nearest] - baseline) <= max(measure_sampling_interval(baseline), measure_sampling_interval(run)) / 2
        )
        kept = np.flatnonzero(mutual & close)
        return cls(kept, nearest[kept])

    def __len__(self) -> int:
        return len(self.baseline)

    def select_last_part(self, share: float) -> SamplePairs:
        """Return the last part of the pairs, at least one pair."""
        n = max(1, round(len(self) * share))
        return SamplePairs(self.baseline[-n:], self.run[-n:])


def _nearest(of: Ints, among: Ints, later: bool) -> Ints:
    """Return the index of the nearest step. If two steps are equally near, choose the later or the earlier step, as
    requested.
    """
    right = np.clip(np.searchsorted(among, of), 0, len(among) - 1)
    left = np.maximum(right - 1, 0)
    before, after = np.abs(of - among[left]), np.abs(among[right] - of)
    return np.where(before < after if later else before <= after, left, right)


def measure_sampling_interval(steps: Ints) -> float:
    """Return the median number of steps between samples; 0 with fewer than two samples."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0


def compute_last_axis_median(values: Floats) -> Floats:
    """Return the median over the last axis, [T, S] -> [T], ignoring NaN. Return NaN if all values are NaN."""
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


def compute_last_axis_lower_median(values: Floats) -> Floats:
    """Return the median over the last axis, ignoring NaN. If there are two middle values, return the lower value."""
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


def split_into_constant_stretches(places: Ints) -> Iterator[tuple[int, slice]]:
    """Yield the value and the slice of each run of equal consecutive values."""
    ends = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else [0]
    for first, end in itertools.pairwise(ends):
        yield int(places[first]), slice(first, end)

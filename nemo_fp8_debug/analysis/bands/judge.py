"""Which operands of a run are beyond the bands of healthy runs, and which have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import polars as pl

from ..comparison.evidence import OF_GRADIENTS
from ..runs.grid import Floats
from ..runs.run import Run
from .bands import JUDGED, Bands, Kinds, OfKinds, lasting

Bools = npt.NDArray[np.bool_]
_KEY = ["layer", "role"]
#: percent of values that underflow or overflow because of an outlier, at least
_COSTS = 0.5
#: how many times the least rise above all that healthy runs did counts
_BEYOND = 1.5


@dataclass(frozen=True)
class Judged:
    """A run against bands."""

    #: operands beyond them: layer, role, onset (step), excess (how many times the least rise that counts), earliest first
    beyond: pl.DataFrame
    #: layer, role of those that have a band
    covered: pl.DataFrame
    #: operands in all
    operands: int
    #: runs that the bands were learned from
    runs: int

    @property
    def all_covered(self) -> bool:
        """Whether nine of ten have a band."""
        return len(self.covered) >= 0.9 * self.operands > 0


def told(judged: Judged | None) -> str:
    """What a run without a baseline was judged by, in a sentence."""
    if judged is None:
        known = "no bands of healthy runs were learned from models of its class"
    elif not len(judged.covered):
        known = "the bands of healthy runs know no operands of such recipes and sizes"
    else:
        return (
            f"Bands of {judged.runs} healthy runs stand for a baseline of {len(judged.covered)} of {judged.operands} "
            "operands; they give medium confidence at most."
        )
    return (
        f"Operands in FP8 are judged by fixed limits, and others by nothing: {known}. `nemo-fp8-debug learn` makes bands of "
        "runs of your own."
    )


def judge(run: Run, bands: Bands) -> Judged:
    """Lay a run's operands against bands.

    Beyond is what lasts for three samples above all that lasted in healthy runs, by as much again as that rose above their
    median. A single sample is judged by fixed limits: a spike of one run is no measure for that of another.
    """
    parts = Kinds.of(run).parts(partial(_judge, bands))
    beyond, covered = (pl.concat(each) for each in zip(*parts, strict=True))
    beyond = beyond.sort("onset", -pl.col("excess"), maintain_order=True)
    return Judged(beyond, covered, len(run.metrics.tensors), bands.runs)


def _judge(bands: Bands, kinds: OfKinds) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Of some operands, those beyond the bands and those that have any; columns as of `Judged`."""
    covered = np.zeros(len(kinds.tensors), dtype=bool)
    onset, excess = np.full(len(covered), np.iinfo(np.int64).max), np.zeros(len(covered))
    least = np.where(kinds.tensors["role"].to_numpy() == "grad_output", OF_GRADIENTS, 1.0)
    for evidence in JUDGED:
        values = kinds.values(evidence)
        if evidence.metric == "outlier_log2":  # one that costs no values is no loss
            values = np.where(kinds.lost() > _COSTS, values, np.nan)
        for phase, samples in kinds.phases():
            band = bands.of(kinds.tensors, evidence, phase)
            known = band["lasting"].is_not_null().to_numpy()
            covered |= known & (phase == "later")
            if not samples.any():
                continue
            rise = least * evidence.least_of(band["median"].to_numpy())
            for i, at, times in _out(rise, values[:, samples], band, known):
                step = int(kinds.grid.steps[samples][at])
                onset[i], excess[i] = min(onset[i], step), max(excess[i], times)
    out = np.flatnonzero(excess > 0)
    columns = {"onset": onset[out].astype(np.int64), "excess": excess[out].astype(np.float64)}
    beyond = kinds.tensors.select(_KEY)[out.tolist()].with_columns(pl.Series(name, of) for name, of in columns.items())
    return beyond, kinds.tensors.select(_KEY).filter(pl.Series(covered, dtype=pl.Boolean))


def _out(least: Floats, values: Floats, band: pl.DataFrame, known: Bools) -> Iterator[tuple[int, int, float]]:
    """Tensor, sample and excess of those that are out.

    Args:
        least: [T], the rise that counts.
    """
    median, most = (band[name].to_numpy()[:, None] for name in ("median", "lasting"))
    with np.errstate(invalid="ignore"):
        strength = np.nan_to_num((lasting(values) - most) / np.fmax(least[:, None], most - median), nan=0.0)
    for i in np.flatnonzero(known & (strength > _BEYOND).any(axis=1)):
        at = int(np.argmax(strength[i] > _BEYOND))
        yield int(i), at, float(strength[i, at])

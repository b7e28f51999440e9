"""Combine several good runs that differ in their seed: choose the runs that count, average their losses, and measure the
spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.special import stdtrit

from .curve import LossCurve, PercentBase
from .gap import FEWEST, PART, Floats, Ints, align_losses

#: least number of losses in common from which we can decide whether two runs saw the same batches
_TELL = 40
#: a baseline must cover this fraction of the steps that the longest baseline covers
_COVERS = 0.9


@dataclass(frozen=True)
class SeedSpread:
    """The spread of final losses between runs that differ only in their seed and batches."""

    n: int
    #: standard deviation of the mean losses over the last part, in percent of their mean or range
    spread: float

    @property
    def distance_from_mean_factor(self) -> float:
        """Return the usual distance of another run from the mean of these runs, relative to the usual distance between two
        runs.
        """
        return float(np.sqrt((1 + 1 / self.n) / 2))

    def compute_seed_limit(self, confidence: float) -> float:
        """Return a limit in percent above the mean. With the given confidence, another run of the same recipe ends below
        this limit.
        """
        return self.spread * float(np.sqrt(1 + 1 / self.n) * stdtrit(self.n - 1, confidence))

    def to_json(self) -> dict[str, float]:
        """Return n, spread, and the percentage above the mean that 1 in 20 other runs would reach."""
        return {"n": self.n, "spread": self.spread, "one_in_20": self.compute_seed_limit(0.95)}


@dataclass(frozen=True)
class BaselineLoss:
    """The loss that a run is compared with."""

    #: loss of one baseline, or the mean loss of several baselines
    curve: LossCurve
    #: spread of several baselines; None for one baseline
    seeds: SeedSpread | None = None
    #: sentences that say which of several baselines are used, and why others are not
    notes: Sequence[str] = ()


def choose_baseline_loss(run: tuple[str, LossCurve], baselines: Mapping[str, LossCurve]) -> BaselineLoss:
    """Choose the loss that a run is compared with: the loss of the only baseline, the loss of a baseline that saw the run's
    batches, or the mean loss of several baselines.

    Args:
        run: name and losses of the run.
        baselines: losses by name, at least one.

    Example:
        >>> noise = np.random.default_rng(0).normal(0, 0.02, (3, 200))
        >>> tables = [pl.DataFrame({"step": range(200), "loss": 2 + each}) for each in noise]
        >>> first, other, run = map(LossCurve.from_steps_table, tables)
        >>> found = choose_baseline_loss(("run", run), {"first": first, "other": other, "again": first})
        >>> found.seeds.n, found.notes[0]
        (2, 'again does not count for the loss: it saw the batches of first.')
    """
    first = next(iter(baselines.values()))
    if len(baselines) == 1:
        return BaselineLoss(first)
    counted, notes = _that_count(run, baselines)
    paired = next((name for name, curve in counted.items() if align_losses(run[1], curve).has_shared_noise), None)
    if paired is not None:
        return BaselineLoss(
            counted[paired], None, [f"{paired} saw the run's batches, so we compare only with this baseline.", *notes]
        )
    if len(counted) < 2:
        return BaselineLoss(next(iter(counted.values()), first), None, notes)
    mean = mean_of([*counted.values()])
    return BaselineLoss(mean, seeds_of([*counted.values()], mean), notes)


def _that_count(run: tuple[str, LossCurve], baselines: Mapping[str, LossCurve]) -> tuple[dict[str, LossCurve], list[str]]:
    """Return the baselines that count, and sentences that say why others do not count."""
    counted, notes = dict[str, LossCurve](), list[str]()
    others = {name for name, curve in baselines.items() if name != run[0] and not curve.has_equal_losses(run[1])}
    most = max((_covered(run[1], baselines[name]) for name in others), default=0)
    for name, curve in baselines.items():
        itself = "" if name in others else "it is the run itself"
        why = itself or _why_not(run[1], curve, most) or _like(curve, counted)
        if why:
            notes.append(f"{name} does not count for the loss: {why}.")
        else:
            counted[name] = curve
    return counted, notes


def _why_not(run: LossCurve, baseline: LossCurve, most: int) -> str:
    """Return the reason why a baseline does not count, or an empty string if it counts.

    Args:
        most: number of the run's steps that the longest baseline covers.
    """
    if not baseline.has_enough_losses:
        return "it has too few losses"
    if baseline.percent_base is None and not baseline.smooth[-1]:
        return "its losses end at zero"
    lost = baseline.all_nonfinite_from_step if baseline.all_nonfinite_from_step is not None else baseline.divergence_step
    if lost is not None:
        return f"it diverges itself, from {lost} on"
    covered = _covered(run, baseline)
    return "" if covered >= _COVERS * most else f"it covers {covered} steps of the run, but another baseline covers {most}"


def _covered(run: LossCurve, baseline: LossCurve) -> int:
    """Count the steps of a run between the first and the last step of a baseline."""
    if not len(run.steps) or not len(baseline.steps):
        return 0
    return int(((run.steps >= baseline.steps[0]) & (run.steps <= baseline.steps[-1])).sum())


def _like(baseline: LossCurve, counted: Mapping[str, LossCurve]) -> str:
    """If a baseline saw the batches of a baseline that counts, or may have seen them, return a clause that says so.
    Otherwise return an empty string.
    """
    for name, curve in counted.items():
        both = align_losses(baseline, curve)
        if len(both.steps) < _TELL:
            return f"with {len(both.steps)} losses in common we cannot tell whether it saw the batches of {name}"
        if both.has_shared_noise:
            return f"it saw the batches of {name}"
    return ""


def mean_of(curves: Sequence[LossCurve]) -> LossCurve:
    """Return the mean of several losses, at those steps of the longest curve at which all curves have finite losses.

    If another curve has no loss at a step, interpolate the loss.

    Example:
        >>> tables = [pl.DataFrame({"step": [0, 1, 2, 3], "loss": [x] * 4}) for x in (1.0, 3.0)]
        >>> mean_of([LossCurve.from_steps_table(table) for table in tables]).losses.tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    start, stop = max(int(each.steps[0]) for each in curves), min(int(each.steps[-1]) for each in curves)
    steps = max(curves, key=lambda each: len(each.steps)).steps
    steps = steps[(steps >= start) & (steps <= stop)]
    losses = _at(curves, steps)
    known = np.isfinite(losses).all(axis=0)
    return LossCurve.from_steps_table(pl.DataFrame({"step": steps[known], "loss": losses[:, known].mean(axis=0)}))


def seeds_of(curves: Sequence[LossCurve], mean: LossCurve) -> SeedSpread:
    """Measure the spread of the final losses of several runs.

    Args:
        mean: mean of all curves.

    Example:
        >>> curves = [LossCurve.from_steps_table(pl.DataFrame({"step": range(50), "loss": [x] * 50})) for x in (1.98, 2.02)]
        >>> round(seeds_of(curves, mean_of(curves)).spread, 2)
        1.41
    """
    n = len(mean.steps)
    last = mean.steps[n - max(round(PART * n), min(FEWEST, n)) :]
    ends = _at(curves, last).mean(axis=1)
    return SeedSpread(
        len(curves), 100 * float(ends.std(ddof=1) / PercentBase.choose_base_value(mean.percent_base, float(ends.mean())))
    )


def _at(curves: Sequence[LossCurve], steps: Ints) -> Floats:
    """Return the interpolated losses at given steps, [curves, steps]. A loss that is NaN or infinite stays infinite or
    NaN.
    """
    with np.errstate(invalid="ignore"):
        return np.stack([np.interp(steps, each.steps, each.losses) for each in curves])

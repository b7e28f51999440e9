"""Are there more spikes than a baseline has, and does the loss recover from them more slowly?

A spike is common to FP8 and BF16 training. It is FP8's where FP8 spikes more often, or comes back more slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...loss.curve import LossCurve
from .finding import Finding

#: standard deviations of the loss, and part of it, by which a step stands above the running median to be a spike
SIGMAS, PART = 6.0, 0.05
#: standard deviations within which the loss has come back
_BACK = 3.0
#: chance of as many spikes under the baseline's rate, below which there are more
_CHANCE = 0.01
#: spikes of either run whose recovery can be compared
_FEW = 3


@dataclass(frozen=True)
class Spike:
    """Steps in a row that stand above the running median of the loss."""

    step: int
    loss: float
    #: steps until the loss is within its noise again; None: the record ends before
    recovery: int | None


def spikes(curve: LossCurve) -> list[Spike]:
    """Of a run, oldest first. A loss that begins high and falls is none: a spike rises."""
    sigma = curve.scatter
    with np.errstate(invalid="ignore"):
        height = curve.losses - curve.smooth
        out = (height > np.maximum(SIGMAS * sigma, PART * np.abs(curve.smooth))) & np.isfinite(curve.smooth)
        back = np.flatnonzero(height <= _BACK * sigma)
    found: list[Spike] = []
    until = back[0] if len(back) else len(out)  # what is before belongs to the spike before, or to the beginning
    for i in np.flatnonzero(out):
        if i < until:
            continue
        after = back[back > i]
        until = after[0] if len(after) else len(out)
        recovery = int(curve.steps[until] - curve.steps[i]) if len(after) else None
        found.append(Spike(int(curve.steps[i]), float(curve.losses[i]), recovery))
    return found


def compared(run: LossCurve, baseline: LossCurve | None, unit: str = "step") -> Finding | None:
    """More spikes than in the baseline, or slower recovery; None where there is nothing to say.

    Args:
        unit: what `steps` of both count.
    """
    mine = spikes(run)
    if not mine:
        return None
    told, since = _told("this run", mine, run, unit), mine[0].step
    if baseline is None or not len(baseline.losses):
        return Finding("spikes", "unknown", "low", f"{told}; without a baseline that is neither many nor few", since=since)
    theirs = spikes(baseline)
    facts = f"{told}; {_told('the baseline', theirs, baseline, unit)}"
    if chance(len(mine), len(theirs), len(run.losses), len(baseline.losses)) < _CHANCE:
        return Finding("spikes", "unknown", "high", f"spikes are more frequent: {facts}", _ADVICE, since=since)
    if min(len(mine), len(theirs)) >= _FEW and _recovery(mine) > 2 * max(_recovery(theirs), 1):
        return Finding("spikes", "unknown", "medium", f"recovery is slower: {facts}", _ADVICE, since=since)
    return Finding("spikes", "none", "medium", f"no more than chance explains: {facts}", since=since)


_ADVICE = "Sample the steps around a spike (`triggers=['loss_spike']`) and compare them with those before."


def _told(whose: str, found: list[Spike], curve: LossCurve, unit: str) -> str:
    if not found:
        return f"{whose} has no spike in {len(curve.losses)} losses"
    median = _recovery(found)
    recovery = f"recovery in {median:.0f} {unit}s (median)" if math.isfinite(median) else "without recovery"
    return f"{whose} has {len(found)} spike{'s' * (len(found) > 1)} in {len(curve.losses)} losses, {recovery}"


def _recovery(found: list[Spike]) -> float:
    """Median, of those that did not recover infinite."""
    return float(np.median([math.inf if spike.recovery is None else spike.recovery for spike in found]))


def chance(mine: int, theirs: int, losses: int, their_losses: int) -> float:
    """That so many of all spikes fall into this run if both spike at the same rate (conditional binomial test; Przyborowski
    and Wilenski, Biometrika 31, 1940)."""
    n, p = mine + theirs, losses / (losses + their_losses)
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
        for k in range(mine, n + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))

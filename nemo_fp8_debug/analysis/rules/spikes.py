"""Are there more spikes than a good run has, and does the loss recover from them more slowly?

A spike is common to FP8 and BF16 training. It is FP8's where FP8 spikes more often, or comes back more slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..loss import LossCurve
from .finding import Finding

#: standard deviations of the loss, and part of it, by which a step stands above the running median to be a spike
SIGMAS, PART = 6.0, 0.05
#: standard deviations within which the loss has come back
_BACK = 3.0
#: chance of as many spikes under the good run's rate, below which there are more
_CHANCE = 0.01


@dataclass(frozen=True)
class Spike:
    """Steps in a row that stand above the running median of the loss."""

    step: int
    loss: float
    #: steps until the loss is within its noise again; None: the record ends before
    recovery: int | None


def spikes(curve: LossCurve) -> list[Spike]:
    """Of a run, oldest first."""
    sigma = curve.scatter
    height = curve.losses - curve.smooth
    with np.errstate(invalid="ignore"):
        out = (height > np.maximum(SIGMAS * sigma, PART * np.abs(curve.smooth))) & np.isfinite(curve.smooth)
        back = np.flatnonzero(height <= _BACK * sigma)
    found: list[Spike] = []
    for i in np.flatnonzero(out):
        if found and (found[-1].recovery is None or curve.steps[i] < found[-1].step + found[-1].recovery):
            continue  # of the one before
        after = back[back > i]
        recovery = int(curve.steps[after[0]] - curve.steps[i]) if len(after) else None
        found.append(Spike(int(curve.steps[i]), float(curve.losses[i]), recovery))
    return found


def compared(bad: LossCurve, good: LossCurve | None) -> Finding | None:
    """More spikes than in the good run, or slower recovery; None where there is nothing to say."""
    mine = spikes(bad)
    if not mine:
        return None
    told = _told("this run", mine, bad)
    if good is None or not len(good.losses):
        return Finding(
            "spikes", "unknown", "low", f"{told}; without a good run that is neither many nor few", since=mine[0].step
        )
    theirs = spikes(good)
    facts = f"{told}; {_told('the good one', theirs, good)}"
    if _chance(len(mine), len(theirs), len(bad.losses), len(good.losses)) < _CHANCE:
        return Finding("spikes", "unknown", "high", f"spikes are more frequent: {facts}", _ADVICE, since=mine[0].step)
    if len(theirs) and len(mine) > 2 and _recovery(mine) > 2 * max(_recovery(theirs), 1):
        return Finding("spikes", "unknown", "medium", f"recovery is slower: {facts}", _ADVICE, since=mine[0].step)
    return Finding("spikes", "none", "high", f"no more than is usual: {facts}", since=mine[0].step)


_ADVICE = "Sample the steps around a spike (`triggers=['loss_spike']`) and compare them with those before."


def _told(whose: str, found: list[Spike], curve: LossCurve) -> str:
    if not found:
        return f"{whose} has no spike in {len(curve.losses)} steps"
    return f"{whose} has {len(found)} spikes in {len(curve.losses)} steps, recovery in {_recovery(found):.0f} (median)"


def _recovery(found: list[Spike]) -> float:
    """Median over those that recovered; infinite where none did."""
    known = [spike.recovery for spike in found if spike.recovery is not None]
    return float(np.median(known)) if known else math.inf


def _chance(mine: int, theirs: int, steps: int, their_steps: int) -> float:
    """That so many of all spikes fall into this run if both spike at the same rate (conditional binomial test)."""
    n, p = mine + theirs, steps / (steps + their_steps)
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(mine, n + 1))

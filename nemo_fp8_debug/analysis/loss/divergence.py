"""Since when a run's loss lies above a baseline's."""

from __future__ import annotations

import numpy as np

from .. import thresholds
from .alignment import Aligned, Floats, align
from .curve import LossCurve
from .gap import PART, TOO_FEW, gap_of
from .onset import stays
from .smoothing import persistence, running_median


def above(run: LossCurve, baseline: LossCurve) -> int | None:
    """First step from which a run's loss stays above a baseline's for good; None: it does not, or that cannot be seen.

    The run is compared with the baseline batch by batch or with the baseline's running median, whichever leaves less noise:
    runs of the same batches have most of it in common.

    Example:
        >>> import polars as pl
        >>> def losses(rise): return LossCurve.of(pl.DataFrame({"step": range(100), "loss": [2.0] * 60 + [2 + rise] * 40}))
        >>> above(losses(0.1), losses(0.0))
        60
    """
    if not len(run.losses) or not len(baseline.losses):
        return None
    aligned = align(run, baseline)
    n = len(aligned.steps)
    if n < 2:
        return None
    half = max(2, n // 12)
    apart, smooth, noise = min((_apart(aligned, each, half) for each in (True, False)), key=lambda found: found[2])
    first = stays(smooth > thresholds.DEPARTS_SIGMAS * noise, apart, half)
    if first is None:
        return None
    plain = float(np.median(smooth[first:])) > thresholds.DEPARTS_PLAINLY * noise
    return int(aligned.steps[first]) if plain or _is_sure(aligned, first) else None


def _apart(aligned: Aligned, by_batch: bool, half: int) -> tuple[Floats, Floats, float]:
    """How far the run lies above the baseline, its running median, and the noise of that."""
    reference = aligned.baseline if by_batch else running_median(aligned.baseline, half)
    with np.errstate(invalid="ignore"):
        # Where neither is a number, neither is above the other.
        apart = np.nan_to_num(aligned.run - reference, nan=0.0, posinf=np.inf, neginf=-np.inf)
        smooth = running_median(apart, half)
        noise = _noise(apart - smooth, half)
        if not by_batch:
            noise = float(np.hypot(noise, _noise(aligned.baseline - reference, half)))
    return apart, smooth, noise


def _noise(apart: Floats, half: int) -> float:
    """Standard deviation of a running median of noise like this."""
    finite = apart[np.isfinite(apart)]
    if not len(finite):
        return 0.0
    scatter = float(np.median(np.abs(finite))) / 0.6745
    return float(np.sqrt(np.pi / 2) * scatter * persistence(finite) / np.sqrt(2 * half + 1))


def _is_sure(aligned: Aligned, first: int) -> bool:
    """Whether the mean over the last part, and not before `first`, is above the baseline's; of few losses, yes."""
    n = len(aligned.steps)
    start = max(min(max(first, round((1 - PART) * n)), n - TOO_FEW), 0)
    found = gap_of(aligned, after=int(aligned.steps[start]) - 1)
    return found is None or found.infinite or found.interval(thresholds.DEPARTS_SURE)[0] > 0

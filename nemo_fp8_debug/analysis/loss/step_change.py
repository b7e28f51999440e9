"""Did the loss rise when something else went wrong? A known step needs far less than a search for one."""

from __future__ import annotations

import numpy as np
from scipy.special import stdtrit

from .alignment import Floats, align
from .curve import LossCurve
from .smoothing import running_median, standard_error

#: losses on either side of the step, at most as a part of all, and at least
_PART, _FEWEST = 6, 10
#: confidence with which the rise is above 0
SURE = 0.995


def rises_at(run: LossCurve, baseline: LossCurve | None, step: int) -> float | None:
    """By how many percent the loss is higher after a step than before; None: it is not, or that cannot be seen.

    A loss that falls is higher before, so without a baseline a rise is more than what is seen. With one of other batches the
    two are compared as far as they moved: that one lies above the other all along does not count.

    Args:
        step: known from elsewhere.

    Example:
        >>> import polars as pl
        >>> losses = np.where(np.arange(200) < 120, 2.0, 2.4) + np.random.default_rng(0).normal(0, 0.05, 200)
        >>> round(rises_at(LossCurve.of(pl.DataFrame({"step": range(200), "loss": losses})), None, 120))
        21
    """
    steps, losses = run.steps, run.losses
    if baseline is not None and baseline.has_enough:
        aligned = align(run, baseline)
        half = max(2, len(aligned.steps) // 12)
        # In units of the baseline, so that what is left is what the run did of its own.
        steps, losses = aligned.steps, aligned.run / running_median(aligned.baseline, half)
    at = int(np.searchsorted(steps, step))
    width = max(len(steps) // _PART, _FEWEST)
    before, after = losses[max(at - width, 0) : at], losses[at : at + width]
    if min(len(before), len(after)) < _FEWEST or not np.isfinite(before).all() or before.mean() <= 0:
        return None
    back = after[np.isfinite(after)]  # one that was lost for a few steps has not risen by that
    return _rise(before, back) if len(back) >= _FEWEST else float("inf")


def _rise(before: Floats, after: Floats) -> float | None:
    apart = float(after.mean() - before.mean())
    errors = [standard_error(each) for each in (before, after)]
    error = float(np.hypot(errors[0][0], errors[1][0]))
    least = error * float(stdtrit(min(each[1] for each in errors), SURE))
    return 100 * apart / float(before.mean()) if apart > least else None

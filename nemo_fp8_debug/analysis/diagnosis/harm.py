"""Whether a run is harmed, from its loss and from what else is known of it."""

from __future__ import annotations

import numpy as np

from ..loss.outcome import LossOutcome
from .rules.finding import Finding

#: how many times the limit a gap must be that another seed may explain, if something that often harms is found too, and if
#: something else is, with a baseline of the same model
_TIMES, _TIMES_ELSE = 2.0, 5.0


def is_likely(loss: LossOutcome, blamed: Finding | None) -> bool:
    """Whether harm is likely that the loss alone cannot tell.

    With a baseline of other batches two things must agree: a gap of twice the limit, which another seed may explain, and
    something that harmed at least half of the benchmark's runs that had it; or a gap of five times the limit to a baseline
    of the same model, and anything. Alone, something that harmed most of them.

    Args:
        blamed: what the verdict names; None: nothing.
    """
    if loss.harm != "unknown" or blamed is None or blamed.confidence == "low":
        return False
    if loss.gap is None:
        return blamed.severity >= 2
    if loss.gap.paired:
        return False
    times = _TIMES if blamed.severity >= 1 else _TIMES_ELSE if loss.same_model else np.inf
    return loss.gap.percent > times * loss.max_gap

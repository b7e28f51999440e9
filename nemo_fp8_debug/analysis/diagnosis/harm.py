"""Whether a run is harmed, from its loss and from what else is known of it."""

from __future__ import annotations

from ..loss.outcome import LossOutcome
from .rules.finding import Finding

#: how many times the limit a gap must be that another seed may explain, if something that often harms is found too
_TIMES = 2.0


def is_likely(loss: LossOutcome, blamed: Finding | None) -> bool:
    """Whether harm is likely that the loss alone cannot tell.

    With a baseline of other batches two things must agree: a gap of twice the limit, which another seed may explain, and
    something that harmed at least half of the benchmark's runs that had it. Alone, something that harmed nearly all.

    Args:
        blamed: what the verdict names; None: nothing.
    """
    if loss.harm != "unknown" or blamed is None or blamed.confidence == "low":
        return False
    if loss.gap is None:
        return blamed.severity >= 2
    return blamed.severity >= 1 and not loss.gap.paired and loss.gap.percent > _TIMES * loss.max_gap

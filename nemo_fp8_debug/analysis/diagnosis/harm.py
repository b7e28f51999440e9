"""Whether a run is harmed, from its loss and from what else is known of it."""

from __future__ import annotations

from ..loss.outcome import LossOutcome
from .rules.finding import Finding

#: how many times the limit a gap must be that another seed may explain, by the severity of what is found too
_TIMES = (3.0, 2.0, 1.0)


def is_likely(loss: LossOutcome, blamed: Finding | None) -> bool:
    """Whether harm is likely that the loss alone cannot tell.

    With a baseline of other batches two things must agree: a gap above the limit, which another seed may explain, and
    something that harmed most of the benchmark's runs that had it; or a gap of twice the limit and something that harmed up
    to half of them; or one of three times the limit to a baseline of the same model, and anything. Alone, something that
    harmed most of them.

    Args:
        blamed: what the verdict names; None: nothing.
    """
    if loss.harm != "unknown" or blamed is None or blamed.confidence == "low":
        return False
    if loss.gap is None:
        return blamed.severity >= 2
    if loss.gap.paired:
        return False
    if blamed.severity == 0 and not loss.same_model:
        return False  # other models lie apart by more than that
    return loss.gap.percent > _TIMES[blamed.severity] * loss.max_gap

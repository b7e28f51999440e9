"""Did the loss go up to another level, and stay there? That needs no baseline: a loss that learns goes down."""

from __future__ import annotations

from ...formatting import number
from ...loss.curve import LossCurve
from ...loss.outcome import OF_RANGE
from .finding import Finding


def level(loss: LossCurve, unit: str) -> Finding | None:
    """That it did, if it did.

    Args:
        unit: what steps are counted in.
    """
    if loss.stepped_up is None:
        return None
    step, percent = loss.stepped_up
    of = "" if loss.range_before(step) is None else OF_RANGE
    facts = f"the loss goes up by {number(percent)}%{of} at {unit} {step}, and stays there for {loss.half} losses or more"
    advice = "Look at what changed at that step: data, labels, masks, the loss function, the batch size, a resumed state."
    return Finding("level", "software", "medium", facts, advice, since=step, severity=2)

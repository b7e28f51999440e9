"""What findings add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rules.finding import Finding


@dataclass(frozen=True)
class Blame:
    """The answer."""

    #: the operand that it began in; None: none, or it cannot be told
    culprit: Finding | None
    #: one of CAUSES
    cause: str
    #: of it, one of CONFIDENCE
    confidence: str


def blamed(
    findings: Sequence[Finding], divergence_step: int | None, latest: int | None, judged: bool, paired: bool
) -> Blame:
    """The culprit, the cause, and how sure that is.

    Args:
        findings: of all rules, those of operands by onset.
        latest: step at which an operand that caused the divergence may have left the band; None: the loss does not diverge.
        judged: whether there are enough samples to have seen one leave the band.
        paired: whether there is a baseline.
    """
    if any(f.cause == "multiplier" and f.confidence == "high" for f in findings):
        return Blame(None, "multiplier", "high")
    before = [f for f in findings if f.rule == "operand" and (latest is None or _precedes(f, divergence_step, latest))]
    if any(f.rule == "reference" for f in findings):
        # A scale that went wrong before is evidence to the contrary.
        return Blame(None, "software", "medium" if any(f.confidence == "high" for f in before) else "high")
    # Without a baseline a hint is no more than what metrics of runs that go well do, too.
    first = next((f for f in before if paired or f.confidence != "low"), None)
    if first is not None:
        return Blame(first, first.cause, first.confidence)
    if not judged or (before and not paired):
        return Blame(None, "unknown", "low")
    if divergence_step is None:
        return Blame(None, "none", "high" if paired else "low")
    return Blame(None, "software", "medium") if paired else Blame(None, "unknown", "low")


def _precedes(found: Finding, divergence_step: int | None, latest: int) -> bool:
    """Whether it can have caused the divergence: what the divergence itself may cause must be there before it."""
    assert found.since is not None and divergence_step is not None
    return found.since < divergence_step if found.may_follow_the_loss else found.since <= latest

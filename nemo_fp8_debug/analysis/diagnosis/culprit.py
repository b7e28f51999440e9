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


def blamed(findings: Sequence[Finding], loss_left: int | None, latest: int | None, judged: bool, paired: bool) -> Blame:
    """The culprit, the cause, and how sure that is.

    Args:
        findings: of all rules, those of operands by onset.
        latest: step at which an operand may have left that brought about the loss; None: the loss stays.
        judged: whether there are samples enough to have seen one leave.
        paired: whether there is a good run.
    """
    if any(f.cause == "multiplier" and f.confidence == "high" for f in findings):
        return Blame(None, "multiplier", "high")
    before = [f for f in findings if f.rule == "operand" and (latest is None or _precedes(f, loss_left, latest))]
    if any(f.rule == "twin" for f in findings):
        # A scale that went wrong before is evidence to the contrary.
        return Blame(None, "software", "medium" if any(f.confidence == "high" for f in before) else "high")
    # Without a good run a hint is no more than what figures of runs that go well do, too.
    first = next((f for f in before if paired or f.confidence != "low"), None)
    if first is not None:
        return Blame(first, first.cause, first.confidence)
    if not judged or (before and not paired):
        return Blame(None, "unknown", "low")
    if loss_left is None:
        return Blame(None, "none", "high" if paired else "low")
    return Blame(None, "software", "medium") if paired else Blame(None, "unknown", "low")


def _precedes(found: Finding, loss_left: int | None, latest: int) -> bool:
    """Whether it can have brought the loss about: what the loss itself may have brought about must be there before it."""
    assert found.since is not None and loss_left is not None
    return found.since < loss_left if found.may_follow_the_loss else found.since <= latest

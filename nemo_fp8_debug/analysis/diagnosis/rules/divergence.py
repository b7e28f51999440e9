"""When did the loss leave, and does a twin in higher precision leave as well?"""

from __future__ import annotations

from ...runs.loss import LossCurve
from .finding import Finding

#: part of a run that is its start
START = 0.05
_START_ADVICE = (
    "Check versions, switch off what is new (CPU offloading, FP8 parameters, overlaps), and run FP8 inputs through BF16 "
    "GEMMs: if that is fine, the fault is in kernels or communication, not in the numbers."
)
_LATER_ADVICE = (
    "Another recipe (current or finer scaling), or layers back to BF16, the first and the last ones first; "
    "`nemo-fp8-debug recommend` says which."
)


def left_at_the_start(bad: LossCurve, since: int | None) -> bool:
    """Whether the loss was off from the start; running medians tell it only to half their width."""
    if since is None:
        return False
    reach = max(START * len(bad.steps), bad.half)
    return bool((bad.steps < since).sum() <= reach)


def told_by(loss: LossCurve) -> bool:
    """Whether there are losses enough to tell whether they leave."""
    return len(loss.losses) > 2 * loss.half


def departure(bad: LossCurve, since: int | None, twin_since: int | None) -> list[Finding]:
    """What the loss tells of the cause.

    Args:
        since: step from which it stays above the good run's; None: it does not.
        twin_since: likewise of a twin in higher precision; None: it does not, or there is none.
    """
    if not told_by(bad):
        return [Finding("departure", "unknown", "high", f"{len(bad.losses)} losses are too few to tell harm by")]
    if since is None:
        return [Finding("departure", "none", "high", "the loss stays")]
    if left_at_the_start(bad, since):
        told, advice = f"the loss is off from the start (step {since})", _START_ADVICE
    else:
        told, advice = f"the loss leaves in mid-run, at step {since}", _LATER_ADVICE
    found = [Finding("departure", "unknown", "medium", told, advice, since=since)]
    if twin_since is not None:
        told = f"the twin's loss leaves too, from step {twin_since}, without what sets it apart from this run"
        advice = "Look at data, learning rate and software."
        found.append(Finding("twin", "software", "high", told, advice, since=twin_since))
    return found

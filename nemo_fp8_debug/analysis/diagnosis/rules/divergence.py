"""When did the loss diverge, and does a reference run in higher precision diverge as well?"""

from __future__ import annotations

from ...loss.curve import LossCurve
from ...loss.outcome import LossOutcome
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
_OTHER_ADVICE = "Look at learning rate, data, kernels and communication."


def diverged_at_the_start(run: LossCurve, since: int | None) -> bool:
    """Whether the loss was off from the start; running medians tell it only to half their width."""
    if since is None:
        return False
    reach = max(START * len(run.steps), run.half)
    return bool((run.steps < since).sum() <= reach)


def divergence(loss: LossOutcome, unit: str, quantizes: bool = True) -> list[Finding]:
    """Return what the loss tells of the cause.

    Args:
        loss: with the reference run's, if there is one.
        unit: what steps are counted in.
        quantizes: whether the run may quantize, so that a recipe may help.
    """
    told, since = loss.told(unit).rstrip("."), loss.harmful_since
    if since is None:
        return [Finding("divergence", "none" if loss.harm == "none" else "unknown", "high", told)]
    advice = _START_ADVICE if diverged_at_the_start(loss.run, since) else _LATER_ADVICE
    advice = advice if quantizes else _OTHER_ADVICE
    found = [Finding("divergence", "unknown", "medium", told, advice, since=since)]
    other = loss.reference_outcome
    if other is not None and (other.harmful_since is not None or loss.differs_from_reference is False):
        told = loss.describe_reference(unit).rstrip(".")
        found.append(Finding("reference", "software", "high", told, _OTHER_ADVICE, since=other.harmful_since))
    return found

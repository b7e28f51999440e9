"""When did the loss diverge, and does a reference run in higher precision diverge as well?"""

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


def diverged_at_the_start(run: LossCurve, since: int | None) -> bool:
    """Whether the loss was off from the start; running medians tell it only to half their width."""
    if since is None:
        return False
    reach = max(START * len(run.steps), run.half)
    return bool((run.steps < since).sum() <= reach)


def has_enough_losses(loss: LossCurve) -> bool:
    """Whether there are enough losses to tell whether they diverge."""
    return len(loss.losses) > 2 * loss.half


def divergence(run: LossCurve, since: int | None, reference_since: int | None) -> list[Finding]:
    """What the loss tells of the cause.

    Args:
        since: step from which it stays above the baseline's; None: it does not.
        reference_since: likewise of a reference run in higher precision; None: it does not, or there is none.
    """
    if not has_enough_losses(run):
        return [
            Finding(
                "divergence", "unknown", "high", f"{len(run.losses)} losses are too few to tell whether the run is harmed"
            )
        ]
    if since is None:
        return [Finding("divergence", "none", "high", "the loss does not diverge")]
    if diverged_at_the_start(run, since):
        told, advice = f"the loss is off from the start (step {since})", _START_ADVICE
    else:
        told, advice = f"the loss diverges in mid-run, at step {since}", _LATER_ADVICE
    found = [Finding("divergence", "unknown", "medium", told, advice, since=since)]
    if reference_since is not None:
        told = (
            f"the reference run, which differs from this one in precision alone, diverges too, from step {reference_since}"
        )
        advice = "Look at learning rate, data, kernels and communication."
        found.append(Finding("reference", "software", "high", told, advice, since=reference_since))
    return found

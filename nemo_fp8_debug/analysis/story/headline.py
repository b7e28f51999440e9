"""The verdict in a line or two: what happened and since when, why, how sure, what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.keys import SHOWN_AS
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.rules.finding import NOT_FP8, Finding
from ..formatting import number
from ..loss.outcome import LossOutcome, described
from ..runs.grid import interval_of
from .told import sentence, steps_apart, tensor_of

if TYPE_CHECKING:  # they import torch
    from ..recommendation.options import Option
    from ..recommendation.recommend import Recommendation


def of_loss(loss: LossOutcome, unit: str) -> dict[str, Any]:
    """What the losses alone tell, before any tensor is read: harm, title, since, unit, gap, gap_told."""
    harm = loss.harm
    return {
        "harm": harm,
        "title": _title_of_loss(loss, unit),
        "since": loss.harmful_since,
        "unit": unit,
        "gap": None if loss.gap is None else loss.gap.to_json(),
        "gap_told": None if loss.gap is None else sentence(described(loss.gap, unit, loss.seeds)),
    }


def headline(found: Diagnosis, recommendation: Recommendation | None, first: dict[str, Any] | None) -> dict[str, Any]:
    """All that is known.

    Args:
        recommendation: None: there is none, or it is not known yet.
        first: the first of the tensors that matter; see `first_of`.
    """
    return of_loss(found.loss, found.run.unit) | {
        "harm": found.harm,
        "title": _title(found),
        "cause": found.cause,
        "cause_told": cause_told(found),
        "confidence": found.confidence,
        "about_fp8": found.about_fp8,
        "since": found.divergence_step,
        "first": first,
        "warning": _warning_told(found, first),
        "interval": _interval(found),
        "change": change(found, recommendation),
    }


def _warning_told(found: Diagnosis, first: Mapping[str, Any] | None) -> str | None:
    """That the early warning came before the first tensor, and why it could; None: it did not."""
    if found.warning is None or first is None or first["since"] is None or found.warning[0] >= first["since"]:
        return None
    step, _, layer, role = found.warning
    unit = found.run.unit
    apart = steps_apart(step, first["since"], unit)
    told = sentence(f"{tensor_of(layer, role)} at {unit} {step}, {apart} the first tensor")
    warns = "A warning needs fewer samples: two in a row beyond what healthy runs do, or one far beyond."
    return (
        f"{told} {warns} A tensor is out of band after three samples in a row beyond what this baseline does."
        if found.comparison
        else f"{told} {warns}"
    )


def _interval(found: Diagnosis) -> int:
    """Steps from one sample to the next, in the median; 0: there is one."""
    return int(interval_of(found.run.metrics.steps))


def _title(found: Diagnosis) -> str:
    unit = found.run.unit
    if found.stopped_at is not None and found.stopped_at == found.divergence_step:
        return f"The optimizer takes no step from {unit} {found.stopped_at} on"
    if found.harm == "likely" and found.loss.harm != "likely":
        return "Harm is likely, though the loss cannot tell"
    if found.harm == "harmless so far":
        return "The loss follows the baseline's so far, and something is out of order"
    return _title_of_loss(found.loss, unit)


def _title_of_loss(loss: LossOutcome, unit: str) -> str:
    if loss.run.lost_at is not None:
        return f"The loss is NaN or infinite from {unit} {loss.run.lost_at} on"
    if loss.rise is not None:
        return f"The loss rises by {loss.percents(loss.rise[1], loss.rise[0])} at {unit} {loss.rise[0]}"
    if loss.harm == "likely" and loss.stepped_up is not None:
        step, percent = loss.stepped_up
        if loss.baseline is not None:
            return f"The loss jumps by {loss.percents(percent, step)} at {unit} {step}, and ends above the baseline's"
        return f"The loss goes up by {loss.percents(percent, step)} at {unit} {step}, and stays there"
    if loss.harm == "harmful":
        return f"The loss diverges at {unit} {loss.since}"
    if loss.harm == "gap":
        return "The loss lies above the baseline's, by less than counts as harm"
    if loss.harm == "none":
        return "The loss follows the baseline's"
    return _title_of_unknown(loss)


def _title_of_unknown(loss: LossOutcome) -> str:
    if not loss.run.has_enough:
        return "Cannot tell: there are too few losses"
    if loss.baseline is None:
        return "Cannot tell: without a baseline, a loss that does not rise shows no harm"
    if loss.gap is None:
        return "Cannot tell: the losses of the runs cannot be compared"
    if loss.is_far_below and loss.gap is not None:
        return f"The loss ends {loss.percents(-loss.gap.percent)} below the baseline's"
    return f"Cannot tell whether the loss is {loss.percents(loss.max_gap)} above the baseline's"


def cause_told(found: Diagnosis) -> str:
    """Why, in a sentence with figures."""
    blamed, means, culprit = found.blame.finding, found.describe_cause(), found.culprit
    reference = found.loss.describe_reference(found.run.unit)
    rest = "".join(f" {told}" for told in ([reference] if reference else []) + found.describe_rest())
    return _cause_told(found, blamed, means, culprit) + rest


def _cause_told(found: Diagnosis, blamed: Finding | None, means: str, culprit: Finding | None) -> str:
    if culprit is not None:
        told = sentence(f"it begins with {culprit.operand} {_when(culprit, found)}: {means} ({culprit.evidence})")
        return told + _besides_told(found)
    if blamed is not None and blamed.cause == found.cause:
        return sentence(f"{means}: {blamed.evidence}")
    if found.cause == "none":
        return found.describe_nothing()
    if found.cause == "unknown":
        return (
            "The record cannot tell why."
            if found.harm in ("harmful", "likely")
            else "The record cannot tell whether anything is wrong."
        )
    return sentence(means)


def _besides_told(found: Diagnosis) -> str:
    others = [f"{other.operand} from {found.run.unit} {other.since} on" for other in found.blame.besides]
    return f" Also wrong by then: {'; '.join(others)}." if others else ""


def _when(culprit: Finding, found: Diagnosis) -> str:
    unit = found.run.unit
    if culprit.since is None:
        return f"at an unknown {unit}"
    if culprit.since == found.run.metrics.steps[0]:
        return "from the start or before"
    loss = found.divergence_step
    apart = "" if loss is None else f", {steps_apart(culprit.since, loss, unit)} the loss"
    return f"at {unit} {culprit.since}{apart}"


def change(found: Diagnosis, recommendation: Recommendation | None) -> str | None:
    """What to change, in a sentence; None: nothing, or it is not known."""
    wrong = found.culprit is not None or found.harm in ("harmful", "likely", "harmless so far")
    if wrong and found.cause not in NOT_FP8 and recommendation is not None and recommendation.to_change:
        return _recommended(found, recommendation)
    blamed = found.blame.finding
    if blamed is not None and blamed.advice:
        return blamed.advice
    if found.baseline is None and found.harm == "unknown":
        return "Give a baseline, a run that went well: it shows a gap that this run alone cannot."
    return next(iter(found.advice), None) if wrong else None


def _recommended(found: Diagnosis, recommendation: Recommendation) -> str:
    """The change of the operand that is blamed, or else the first one."""
    culprit, changes = found.culprit, recommendation.to_change
    key = None if culprit is None else (culprit.layer, culprit.role)
    first = next((f for f in changes if (f.layer, f.role) == key), changes[0])
    before, after = (_error_of(option) for option in (first.options[0], first.chosen))
    errors = "" if before is None or after is None else f": relative error {number(before)} -> {number(after)}"
    others = len(changes) - 1
    more = "" if not others else f"; and {others} other change{'' if others == 1 else 's'}"
    return sentence(f"cast {first.name} in {first.chosen.recipe}{errors}{more}")


def _error_of(option: Option) -> float | None:
    return None if option.errors is None else option.errors.relative_error


def first_of(row: dict[str, Any], found: Diagnosis, others: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """The first tensor of the ranking: layer, role, tensor, since, told, is_consequence; None: nothing is out of order.

    `with`: how many others went out at the same sample.
    """
    onset = row["onset"]
    if not row["blamed"] and (onset is None or found.cause == "none"):
        return None
    blamed, unit = found.blame.finding, found.run.unit
    began = [step for step in (found.divergence_step, None if blamed is None else blamed.since) if step is not None]
    consequence = not row["blamed"] and onset is not None and bool(began) and onset >= min(began)
    loss = found.divergence_step
    apart = "" if loss is None or onset is None else f", {steps_apart(onset, loss, unit)} the loss"
    since = "" if onset is None else f" from {unit} {onset}{apart}"
    told = f"{tensor_of(row['layer'], row['role'])} is out of band{since}"
    told = sentence(f"{told}: {'a consequence' if consequence else 'the first tensor'}")
    key = {"layer": row["layer"], "role": row["role"], "tensor": SHOWN_AS[row["role"]]}
    together = sum(onset is not None and other["since"] == onset for other in others)
    return key | {"since": onset, "told": told, "is_consequence": consequence, "with": together}

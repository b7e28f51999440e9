"""What happened in a run, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.keys import SHOWN_AS
from ..loss.outcome import LossOutcome
from .finding import CAUSES, Finding

#: kinds of events, in the order in which events of one step are shown
KINDS = (
    *("lr", "recipe", "replica", "product", "scale", "values", "nonfinite", "warning"),
    *("loss", "reference", "multiplier", "grad_norm", "weights", "optimizer"),
)
#: by rule, the kind of event; of a tensor out of band it depends on the cause
_KIND_OF_RULE = {
    "learning rate": "lr",
    "recipe": "recipe",
    "replicas": "replica",
    "wrong product": "product",
    "nonfinite": "nonfinite",
    "level": "loss",
    "reference": "reference",
    "gradient factor": "multiplier",
    "gradient norm": "grad_norm",
    "sizes": "multiplier",
    "weight decay": "weights",
    "frozen weights": "weights",
    "weight steps": "weights",
    "skipped steps": "optimizer",
}


@dataclass(frozen=True)
class Event:
    """Something that began at a step."""

    step: int
    #: one of KINDS
    kind: str
    #: in a clause
    what: str
    layer: str | None = None
    role: str | None = None


def list_events(
    findings: Sequence[Finding], loss: LossOutcome, warning: tuple[int, float, str, str] | None = None
) -> list[Event]:
    """Return what happened, the earliest first.

    Args:
        warning: step, score, layer and role of the first early warning.
    """
    found = [_make_event(each) for each in findings if each.since is not None and each.cause != "none"]
    if warning is not None:
        step, _, layer, role = warning
        what = f"early warning: {SHOWN_AS[role]} of {layer} is beyond what healthy runs do"
        found.append(Event(step, "warning", what, layer, role))
    return sort_events([*found, *_list_loss_events(loss)])


def sort_events(found: Sequence[Event]) -> list[Event]:
    """Return events by step; those of one step as `KINDS` has them."""
    return sorted(found, key=lambda event: (event.step, KINDS.index(event.kind)))


def _list_loss_events(loss: LossOutcome) -> Iterator[Event]:
    """Yield when the loss departs from the baseline's, and when it diverges."""
    since, diverges = loss.harmful_since, loss.run.lost_at if loss.run.lost_at is not None else loss.run.diverged_at
    if since is not None and loss.baseline is not None:
        yield Event(since, "loss", "the loss departs from the baseline's")
    if diverges is not None and (since is not None or (loss.baseline is None and not loss.begins_at_zero)):
        yield Event(diverges, "loss", "the loss diverges")


def _make_event(found: Finding) -> Event:
    assert found.since is not None
    kind = _KIND_OF_RULE.get(found.rule)
    if kind is None:
        scale = found.kind == "scale" and not found.may_follow_the_loss
        kind = "nonfinite" if found.cause == "nonfinite" else "scale" if scale else "values"
    what = CAUSES[found.cause].means if found.cause != "unknown" else found.evidence
    where = found.operand or found.layer
    return Event(found.since, kind, f"{where}: {what}" if where else what, found.layer, found.role)

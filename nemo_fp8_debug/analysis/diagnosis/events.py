"""List the events of a run in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.keys import SHOWN_AS
from ..loss.outcome import LossOutcome
from .finding import CAUSES, Finding
from .rule import load_rules

#: kinds of events, in the order in which events of the same step are shown
KINDS = (
    *("lr", "recipe", "replica", "product", "scale", "values", "nonfinite", "warning"),
    *("loss", "reference", "multiplier", "grad_norm", "weights", "optimizer"),
)


@dataclass(frozen=True)
class Event:
    """A change that began at a step."""

    step: int
    #: one of KINDS
    kind: str
    #: description of the event, as a clause
    what: str
    layer: str | None = None
    role: str | None = None


def list_events(
    findings: Sequence[Finding], loss: LossOutcome, warning: tuple[int, float, str, str] | None = None
) -> list[Event]:
    """Return the events of a run, the earliest first.

    Args:
        warning: step, score, layer and role of the first early warning.
    """
    kinds = {rule.name: rule.event for rule in load_rules()}
    dated = [each for each in findings if each.since is not None and each.cause != "none"]
    found = [_make_event(each, kinds.get(each.rule, "")) for each in dated]
    if warning is not None:
        step, _, layer, role = warning
        what = f"early warning: {SHOWN_AS[role]} of {layer} is beyond what healthy runs do"
        found.append(Event(step, "warning", what, layer, role))
    return sort_events([*found, *_list_loss_events(loss)])


def sort_events(found: Sequence[Event]) -> list[Event]:
    """Sort events by step, and events of the same step in the order of `KINDS`."""
    return sorted(found, key=lambda event: (event.step, KINDS.index(event.kind)))


def _list_loss_events(loss: LossOutcome) -> Iterator[Event]:
    """Yield the events of the loss: its departure from the baseline's loss, and its divergence."""
    since, diverges = (
        loss.harm_onset_step,
        loss.run.all_nonfinite_from_step if loss.run.all_nonfinite_from_step is not None else loss.run.divergence_step,
    )
    if since is not None and loss.baseline is not None:
        yield Event(since, "loss", "the loss departs from the baseline's")
    if diverges is not None and (since is not None or (loss.baseline is None and not loss.is_negative_from_zero)):
        yield Event(diverges, "loss", "the loss diverges")


def _make_event(found: Finding, kind: str) -> Event:
    assert found.since is not None
    if not kind:
        scale = found.kind == "scale" and not found.may_follow_the_loss
        kind = "nonfinite" if found.cause == "nonfinite" else "scale" if scale else "values"
    where, means = found.tensor_name or found.layer, CAUSES[found.cause].means
    what = means.format(tensor=where) if found.cause != "unknown" else found.evidence
    named = "{tensor}" in means or not where
    return Event(found.since, kind, what if named else f"{where}: {what}", found.layer, found.role)

"""What happened in a run, in order: an answer to what came first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.keys import SHOWN_AS
from .rules.finding import Finding

#: kinds of events, in the order in which events of one step are told
KINDS = (
    *("lr", "recipe", "replica", "product", "scale", "values", "nonfinite", "warning"),
    *("loss", "spike", "reference", "multiplier", "grad_norm", "inputs", "weights", "optimizer"),
)
#: kind, and what a rule's finding is the beginning of; the rules that are left out are about the run as a whole
_BEGINS = {
    "learning rate": ("lr", "the learning rate departs"),
    "gradient norm": ("grad_norm", "the gradient norm grows"),
    "weights": ("weights", "the weights shrink"),
    "optimizer steps": ("optimizer", "the optimizer skips steps"),
    "divergence": ("loss", "the loss diverges"),
    "level": ("loss", "the loss goes up to another level"),
    "reference": ("reference", "the reference run's loss diverges"),
    "multiplier": ("multiplier", "gradients are multiplied by something else"),
    "spikes": ("spike", "the first spike of the loss"),
    "attention": ("values", "logits explode"),
    "router": ("values", "the router collapses"),
    "experts": ("values", "an expert is given no more tokens"),
    "channels": ("values", "a channel stands out"),
    "steps of weights": ("weights", "out of proportion"),
}


@dataclass(frozen=True)
class Event:
    """Something that began at a step."""

    step: int
    #: one of KINDS
    kind: str
    #: in a clause
    what: str
    #: of a tensor
    layer: str | None = None
    role: str | None = None


def events(findings: Sequence[Finding], warning: tuple[int, float, str, str] | None = None) -> list[Event]:
    """What happened, the earliest first.

    Args:
        warning: step, score, layer and role of the first early warning.

    Example:
        >>> rise = Finding("learning rate", "learning_rate", "high", "...", since=130)
        >>> clipped = Finding("operand", "clipping", "medium", "...", layer="layers.0.fc1", role="input", since=160)
        >>> [(event.step, event.what) for event in events([clipped, rise])]
        [(130, 'the learning rate departs'), (160, 'X of layers.0.fc1: clipping')]
    """
    return in_order([*_of_findings(findings), *([] if warning is None else [_of_the_warning(*warning)])])


def in_order(found: Sequence[Event]) -> list[Event]:
    """By step; of one step as `KINDS` has them."""
    return sorted(found, key=lambda event: (event.step, KINDS.index(event.kind)))


def _of_the_warning(step: int, score: float, layer: str, role: str) -> Event:
    told = f"early warning: {SHOWN_AS[role]} of {layer} is beyond what healthy runs do"
    return Event(step, "warning", told, layer, role)


def _of_findings(findings: Sequence[Finding]) -> Iterator[Event]:
    for found in findings:
        if found.since is None or found.cause == "none":
            continue
        where = found.layer, found.role
        if found.rule == "operand":
            yield Event(found.since, _kind_of(found), f"{found.operand}: {found.cause.replace('_', ' ')}", *where)
        elif found.rule == "recipe":
            yield Event(found.since, "recipe", f"{found.operand} is cast under another recipe", *where)
        elif found.rule == "product":
            yield Event(found.since, "product", f"a product of {found.layer} is wrong", *where)
        elif found.rule == "reduction":
            yield Event(found.since, "product", f"the reduced gradient of {found.layer} is wrong", *where)
        elif found.rule == "replicas":
            told = f"ranks hold different copies of a tensor of {found.layer}"
            yield Event(found.since, "replica", told, *where)
        elif found.rule == "still weights":
            yield Event(found.since, "weights", f"most weights of {found.layer} no longer learn")
        elif found.rule == "inputs":
            yield Event(found.since, "inputs", f"X of {found.layer} goes to another level")
        elif found.rule == "nonfinite":
            told = f"the first NaN or infinity, in {found.operand or 'no sampled operand'}"
            yield Event(found.since, "nonfinite", told, *where)
        elif found.rule == "gradient norm" and found.cause == "dead":
            yield Event(found.since, "grad_norm", "the gradient norm is 0")
        elif found.rule == "gradient norm" and found.cause == "multiplier":
            yield Event(found.since, "grad_norm", "the gradient norm moves to another level")
        elif found.rule in _BEGINS:
            kind, what = _BEGINS[found.rule]
            yield Event(found.since, kind, f"{found.operand}: {what}" if found.operand else what, *where)


def _kind_of(found: Finding) -> str:
    """Of an operand out of band: whether its scale went wrong, or its values did."""
    if found.cause == "nonfinite":
        return "nonfinite"
    return "values" if found.may_follow_the_loss or found.cause == "unknown" else "scale"

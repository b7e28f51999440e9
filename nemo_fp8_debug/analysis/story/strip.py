"""Every event of a run on one axis of steps, a row a kind: what came first, and what followed. As text for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.keys import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, SHOWN_AS, STATES
from ..diagnosis.events import Event

_TENSORS = tuple(SHOWN_AS[role] for role in (*ROLES, *ATTENTION_FORWARD, *ATTENTION_BACKWARD))
_NAN, _BETWEEN = "NaN or infinity", "activations"
_OF_KINDS = {
    **{"lr": "learning rate", "grad_norm": "gradient norm", "multiplier": "gradient norm", "loss": "loss"},
    **{"reference": "loss", "weights": "W", "product": "products", "replica": "replicas"},
    "optimizer": "optimizer",
}
#: rows of the strip, from above
ROWS = ("learning rate", "gradient norm", "loss", _NAN, *_TENSORS, _BETWEEN, "products", "replicas", "optimizer")
#: marks of tensors' events, and of all others
MARKS = {"scale": "◆", "values": "●", "nonfinite": "✖", "warning": "!", "recipe": "R"}
_OTHER = "▼"
_LEGEND = {"◆": "scale", "●": "values", "✖": "NaN or infinity", "!": "early warning", "R": "recipe", _OTHER: "begins"}
#: columns between two labels of the axis, at least
_APART = 12


def row_of(event: Event) -> str:
    """The row of the strip that an event is in, one of ROWS.

    Example:
        >>> row_of(Event(130, "lr", "the learning rate departs")), row_of(Event(160, "values", "...", "fc1", "input"))
        ('learning rate', 'X')
    """
    if event.kind in _OF_KINDS:
        return _OF_KINDS[event.kind]
    if event.role is None:
        return _NAN
    if event.role in STATES:
        return "optimizer"
    return SHOWN_AS[event.role] if SHOWN_AS[event.role] in _TENSORS else _BETWEEN


def strip_text(events: Sequence[Mapping[str, Any]], width: int = 80, unit: str = "step") -> str:
    """The events as lines of text: a row a kind, a mark an event, a digit where several share a place.

    Args:
        events: of the story: step, kind, row.
        width: columns of each line, at most; 40 at least.
        unit: what steps are counted in.

    Example:
        >>> events = [{"step": 130, "kind": "lr", "row": "learning rate"}, {"step": 147, "kind": "loss", "row": "loss"}]
        >>> print(strip_text(events, 40))
        learning rate ▼
        loss                                   ▼
        step          130                    147
        ▼ begins
    """
    if not events:
        return ""
    present = [row for row in ROWS if any(event["row"] == row for event in events)]
    margin = max(map(len, (*present, unit))) + 1
    columns = max(width, 40) - margin
    steps: list[int] = [event["step"] for event in events]
    first, last = min(steps), max(steps)

    def place(step: int) -> int:
        return round((step - first) / max(last - first, 1) * (columns - 1))

    lines = [f"{row:<{margin}}{_marks([e for e in events if e['row'] == row], place, columns)}" for row in present]
    lines.append(f"{unit:<{margin}}{_axis(first, last, columns)}")
    used = {_mark(event["kind"]) for event in events}
    legend = "  ".join(f"{mark} {means}" for mark, means in _LEGEND.items() if mark in used)
    return "\n".join(line.rstrip() for line in [*lines, legend])


def _mark(kind: str) -> str:
    return MARKS.get(kind, _OTHER)


def _marks(events: Sequence[Mapping[str, Any]], place: Callable[[int], int], columns: int) -> str:
    at: dict[int, list[str]] = defaultdict(list)
    for event in events:
        at[place(event["step"])].append(_mark(event["kind"]))
    return "".join(_shared(at[i]) if i in at else " " for i in range(columns))


def _shared(marks: Sequence[str]) -> str:
    """One mark for what lies at one place."""
    if len(marks) == 1:
        return marks[0]
    return str(len(marks)) if len(marks) < 10 else "+"


def _axis(first: int, last: int, columns: int) -> str:
    """Steps below their places, the first and the last among them."""
    if first == last:
        return str(first)
    n = max(2, min(columns // max(_APART, len(str(last)) + 4), last - first + 1))
    line = [" "] * columns
    for i in range(n):
        label = str(round(first + (last - first) * i / (n - 1)))
        middle = round((columns - 1) * i / (n - 1))
        start = min(max(middle - len(label) // 2, 0), columns - len(label))
        line[start : start + len(label)] = label
    return "".join(line)

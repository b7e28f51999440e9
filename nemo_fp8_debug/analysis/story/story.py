"""A run's diagnosis and events as plain data: headline, events in order, the strip of events, and the most important
tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from ...core.keys import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, SHOWN_AS, STATES, Key
from ..comparison.drift import SHOWN
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.events import Event, sort_events
from ..diagnosis.narrator import (
    describe_band_exit,
    describe_step_distance,
    explain_blame,
    name_tensor,
    tell_headline,
    tell_loss_headline,
    tell_loss_outcome,
    tell_verdict_reason,
)
from ..diagnosis.ranking import ALSO_WRONG, BLAMED, KEY, compute_tensor_medians, make_tensor_ranking_table
from ..diagnosis.rules.values import find_all_zero_samples
from ..formatting import make_jsonable
from ..loss.outcome import LossOutcome
from ..runs.blocks import map_grid_slices, map_tensor_chunks
from ..runs.grid import MetricGrid, measure_sampling_interval
from ..runs.metrics import MetricsTable
from ..runs.run import Run

_TENSORS = tuple(SHOWN_AS[role] for role in (*ROLES, *ATTENTION_FORWARD, *ATTENTION_BACKWARD))
_NAN, _BETWEEN = "NaN or infinity", "activations"
_OF_KINDS = {
    **{"lr": "learning rate", "grad_norm": "gradient norm", "multiplier": "gradient norm", "loss": "loss"},
    **{"reference": "loss", "weights": "W", "product": "products", "replica": "replicas"},
    "optimizer": "optimizer",
}
#: rows of the strip, from top to bottom
ROWS = ("learning rate", "gradient norm", "loss", _NAN, *_TENSORS, _BETWEEN, "products", "replicas", "optimizer")
#: marks of events in the strip by kind; all other kinds get `_OTHER`
MARKS = {"scale": "◆", "values": "●", "nonfinite": "✖", "warning": "!", "recipe": "R"}
_OTHER = "▼"
_LEGEND = {"◆": "scale", "●": "values", "✖": "NaN or infinity", "!": "early warning", "R": "recipe", _OTHER: "begins"}
#: least number of columns between two labels of the axis
_APART = 12


def row_of(event: Event) -> str:
    """Return the row of the strip for an event, one of ROWS.

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


def draw_event_strip(events: Sequence[Mapping[str, Any]], width: int = 80, unit: str = "step") -> str:
    """Draw the events as text, with one row for each kind and one mark for each event. A digit is the number of events at
    the same place.

    Args:
        events: events of the story: step, kind, row.
        width: largest number of columns in a line, at least 40.
        unit: unit of the steps, such as `step` or `sample`.

    Example:
        >>> events = [{"step": 130, "kind": "lr", "row": "learning rate"}, {"step": 147, "kind": "loss", "row": "loss"}]
        >>> print(draw_event_strip(events, 40))
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
    legend = [f"{mark} {means}" for mark, means in _LEGEND.items() if mark in {_mark(event["kind"]) for event in events}]
    if any(set(line[margin:]) & set("123456789+") for line in lines):
        legend.append("2 to 9, +: number of events")
    lines.append(f"{unit:<{margin}}{_axis(steps, place, columns)}")
    rows = [""]
    for part in legend:
        if rows[-1] and len(rows[-1]) + len(part) + 2 > max(width, 40):
            rows.append("")
        rows[-1] += f"  {part}" if rows[-1] else part
    lines += rows
    return "\n".join(line.rstrip() for line in lines)


def _mark(kind: str) -> str:
    return MARKS.get(kind, _OTHER)


def _marks(events: Sequence[Mapping[str, Any]], place: Callable[[int], int], columns: int) -> str:
    at: dict[int, list[str]] = defaultdict(list)
    for event in events:
        at[place(event["step"])].append(_mark(event["kind"]))
    return "".join(_shared(at[i]) if i in at else " " for i in range(columns))


def _shared(marks: Sequence[str]) -> str:
    """Return one mark for all events at one place: the event's own mark, the number of events, or `+` for ten or more."""
    if len(marks) == 1:
        return marks[0]
    return str(len(marks)) if len(marks) < 10 else "+"


def _axis(steps: Sequence[int], place: Callable[[int], int], columns: int) -> str:
    """Return the axis line: the first and the last step, and each step of an event between them if there is room."""
    line, taken = [" "] * columns, list[int]()
    for step in dict.fromkeys([min(steps), max(steps), *sorted(steps)]):
        middle, label = place(step), str(step)
        if all(abs(middle - other) >= max(_APART, len(label) + 4) for other in taken) or not taken or step == max(steps):
            start = min(max(middle - len(label) // 2, 0), columns - len(label))
            line[start : start + len(label)] = label
            taken.append(middle)
    return "".join(line)


#: number of tensors in a story, and how many of these are chosen by their errors
MOST, WORST = 40, 5


def story(found: Diagnosis) -> dict[str, Any]:
    """Return a run's diagnosis and events as plain data.

    Args:
        found: the result of `diagnose`.

    Returns:
        A dictionary with these keys:
        `headline`: harm, title, cause, cause_told, confidence, about_fp8, since, unit, gap, gap_told, first, warning,
        interval, change.
        `events`: step, kind (one of `diagnosis.events.KINDS`), what, layer, role, and the row of the strip, in order.
        `rows`: the rows of the strip, from top to bottom.
        `tensors`: the 40 most important tensors, by harm rank: layer, role, tensor, blamed, also_wrong, why, since, metric,
        expected, found, harm_rank, error_rank, zero_since, values. If all values of a tensor are zero up to the end,
        zero_since is the first such step and error_rank is null. `values` has, for each metric, the medians of baseline, run
        and reference run over the later half of the samples.

    Raises:
        RecordError: a table of the record is unreadable.

    Example:
        >>> story(diagnose("runs/bad", "runs/baseline"))["headline"]["title"]
        'The learning rate is wrong at step 60. The loss diverged at step 61.'
    """
    tensors = _list_tensors(found, _choose(make_tensor_ranking_table(found)))
    first = _describe_first(tensors, found) if tensors else None
    events = [asdict(event) | {"row": row_of(event)} for event in _list_events(found, tensors)]
    present = {event["row"] for event in events}
    plain: dict[str, Any] = make_jsonable(
        {
            "headline": _make_headline(found, first),
            "events": events,
            "rows": [row for row in ROWS if row in present],
            "tensors": tensors,
        }
    )
    return plain


def make_loss_headline(loss: LossOutcome, unit: str) -> dict[str, Any]:
    """Return the part of the headline that follows from losses alone, before tensors are read: harm, title, since, unit,
    gap, gap_told.
    """
    return {
        "harm": loss.harm,
        "title": tell_loss_headline(loss, unit),
        "since": loss.harm_onset_step,
        "unit": unit,
        "gap": make_jsonable(loss.gap),
        "gap_told": None if loss.gap is None else tell_loss_outcome(loss, unit),
    }


def _make_headline(found: Diagnosis, first: Mapping[str, Any] | None) -> dict[str, Any]:
    return make_loss_headline(found.loss, found.run.unit) | {
        "harm": found.harm,
        "title": tell_headline(found),
        "cause": found.cause,
        "cause_told": tell_verdict_reason(found),
        "confidence": found.confidence,
        "about_fp8": found.is_fp8_the_cause,
        "since": found.divergence_step,
        "first": first,
        "warning": _describe_warning(found, first),
        "interval": int(measure_sampling_interval(found.run.metrics.steps)),
        "change": next(iter(found.advice), None),
    }


def _describe_warning(found: Diagnosis, first: Mapping[str, Any] | None) -> str | None:
    """Return a sentence about the early warning if it came before the first tensor left its band, otherwise None."""
    if (
        found.first_early_warning is None
        or first is None
        or first["since"] is None
        or found.first_early_warning[0] >= first["since"]
    ):
        return None
    step, _, layer, role = found.first_early_warning
    unit = found.run.unit
    distance = describe_step_distance(step, first["since"], unit)
    return f"{name_tensor(layer, role)} at {unit} {step}, {distance} the first tensor."


def _describe_first(tensors: Sequence[Mapping[str, Any]], found: Diagnosis) -> dict[str, Any] | None:
    """Return the first tensor of the ranking: layer, role, tensor, since, told, is_consequence, with.

    `with` is the number of other tensors that left their band in the same sample. Return None if nothing is wrong.
    """
    row, onset = tensors[0], tensors[0]["since"]
    if not row["blamed"] and (onset is None or found.cause == "none"):
        return None
    chosen, unit, loss = found.decision.finding, found.run.unit, found.divergence_step
    began = [step for step in (loss, None if chosen is None else chosen.since) if step is not None]
    consequence = not row["blamed"] and onset is not None and bool(began) and onset >= min(began)
    apart = "" if loss is None or onset is None else f", {describe_step_distance(onset, loss, unit)} the loss"
    since = "" if onset is None else f" from {unit} {onset} on{apart}"
    told = f"{name_tensor(row['layer'], row['role'])} is out of band{since}"
    key = {"layer": row["layer"], "role": row["role"], "tensor": SHOWN_AS[row["role"]]}
    together = sum(onset is not None and other["since"] == onset for other in tensors[1:])
    told = f"{told}: {'a consequence' if consequence else 'the first tensor'}."
    return key | {"since": onset, "told": told, "is_consequence": consequence, "with": together}


def _choose(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the tensors of the story in order of harm, including the tensors with the largest errors."""
    worst = pl.col("error_rank") <= WORST
    within = rows.filter((pl.col("harm_rank") <= MOST - WORST) | worst)
    others = rows.join(within, on=KEY, how="anti", maintain_order="left").head(max(MOST - len(within), 0))
    return pl.concat([within, others]).sort("harm_rank")


def _list_tensors(found: Diagnosis, rows: pl.DataFrame) -> list[dict[str, Any]]:
    reference = _read_medians(None if found.comparison is None else found.comparison.reference)
    zeros = find_zero_since(found.run.metrics.select_tensors_by_key(rows.select(KEY)))
    return [
        _make_tensor(row, found, reference, zeros.get((row["layer"], row["role"]))) for row in rows.iter_rows(named=True)
    ]


def _make_tensor(
    row: Mapping[str, Any], found: Diagnosis, reference: Mapping[Key, Mapping[str, Any]], zero: int | None
) -> dict[str, Any]:
    of_reference = reference.get((row["layer"], row["role"]), {})
    values = {
        name: {"baseline": row[f"{name}_baseline"], "run": row[f"{name}_run"], "reference": of_reference.get(name)}
        for name in SHOWN
    }
    return {
        "layer": row["layer"],
        "role": row["role"],
        "tensor": SHOWN_AS[row["role"]],
        "blamed": row["group"] == BLAMED,
        "also_wrong": row["group"] == ALSO_WRONG,
        "why": explain_blame(row, found, zero),
        "since": row["onset"],
        "metric": row["metric"],
        "expected": row["expected"],
        "found": row["value"],
        "harm_rank": row["harm_rank"],
        "error_rank": None if zero is not None else row["error_rank"],
        "zero_since": zero,
        "values": values,
    }


def _read_medians(reference: Run | None) -> dict[Key, dict[str, Any]]:
    if reference is None:
        return {}
    return {(row["layer"], row["role"]): row for row in compute_tensor_medians(reference, SHOWN).iter_rows(named=True)}


def _list_events(found: Diagnosis, tensors: list[dict[str, Any]]) -> list[Event]:
    """Return the events of the findings, and an event for the onset of each other tensor in the story."""
    told = list(found.events)
    named = {(event.layer, event.role) for event in told if event.kind != "warning"}
    others = [row for row in tensors if row["since"] is not None and (row["layer"], row["role"]) not in named]
    return sort_events([*told, *map(_make_event, others)])


def _make_event(row: Mapping[str, Any]) -> Event:
    kinds, name = {"scale_ratio_log2": "scale", "nonfinite": "nonfinite"}, name_tensor(row["layer"], row["role"])
    what = f"{name}: {describe_band_exit(row, row['zero_since'])}"
    return Event(row["since"], kinds.get(row["metric"], "values"), what, row["layer"], row["role"])


def find_zero_since(metrics: MetricsTable) -> dict[Key, int]:
    """For each tensor that is zero to the end, return the first step from which all its values are zero.

    Example:
        >>> import polars as pl
        >>> rows = {"step": [0, 10, 20], "layer": ["fc1"] * 3, "role": ["input"] * 3, "amax": [0.5, 0.0, 0.0]}
        >>> find_zero_since(MetricsTable.from_rows(pl.DataFrame(rows | {"nan": [0] * 3, "inf": [0] * 3})))
        {('fc1', 'input'): 10}
    """
    if metrics.is_empty():
        return {}
    found = map_tensor_chunks(partial(map_grid_slices, _zero_since), metrics, together=[("amax", "nonfinite")])
    return {key: step for of_block in found for of_part in of_block for key, step in of_part}


def _zero_since(grid: MetricGrid) -> list[tuple[Key, int]]:
    zero = find_all_zero_samples(grid)
    is_other = ~zero & ~(np.isnan(grid.read_metric("amax")) & ~(grid.read_metric("nonfinite") > 0))
    behind = ~np.logical_or.accumulate(is_other[:, ::-1], axis=1)[:, ::-1]
    zeros = zero & behind
    keys = list(grid.tensors.iter_rows())
    return [(keys[i], int(grid.steps[np.argmax(zeros[i])])) for i in np.flatnonzero(zeros.any(axis=1)).tolist()]

"""The story of a run, told once: headline, events in order, and the tensors that matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polars as pl

from ...core.keys import SHOWN_AS, Key
from ...numerics.metric_names import LABELS
from ..comparison.drift import SHOWN
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.events import Event, in_order
from ..diagnosis.ranking import BESIDES, BLAMED, KEY, medians, ranked
from ..formatting import jsonable
from ..runs.run import Run
from .headline import first_of, headline
from .reasons import why
from .strip import ROWS, row_of
from .told import died, tensor_of, value_of
from .zeros import zero_since

if TYPE_CHECKING:  # it imports torch
    from ..recommendation.recommend import Recommendation

#: tensors that are told of, and how many of them because the format holds them worst
MOST, WORST_HELD = 40, 5


def story(found: Diagnosis, recommendation: Recommendation | None = None) -> dict[str, Any]:
    """What there is to tell of a run, as plain data.

    Args:
        found: what `diagnose` found of the run.
        recommendation: what to change in how FP8 is used; None: nothing is known of that.

    Returns:
        `headline`: harm, title, cause, cause_told, confidence, about_fp8, since, unit, gap, gap_told, first, warning,
        change.
        `events`: step, kind (one of `diagnosis.events.KINDS`), what, layer, role, and the row of the strip, in order.
        `rows`: of the strip, from above.
        `tensors`: the 40 that matter, by harm rank: layer, role, tensor, blamed, why, since, metric, expected, found,
        harm_rank, error_rank, zero_since (the step since when all values are zero, to the end, or null; if so, error_rank is
        null), and values, by metric of baseline, run and reference run (medians over the later half of the samples of each).

    Raises:
        RecordError: a table of the record that is read for this only cannot be read.

    Example:
        >>> story(diagnose("runs/bad", "runs/baseline"))["headline"]["title"]
        'The loss diverges at step 61'
    """
    rows = ranked(found)
    tensors = _tensors(found, _that_matter(rows))
    first = first_of(tensors[0] | {"onset": tensors[0]["since"]}, found, tensors[1:]) if tensors else None
    events = [asdict(event) | {"row": row_of(event)} for event in _events(found, tensors)]
    present = {event["row"] for event in events}
    plain: dict[str, Any] = jsonable(
        {
            "headline": headline(found, recommendation, first),
            "events": events,
            "rows": [row for row in ROWS if row in present],
            "tensors": tensors,
        }
    )
    return plain


def _that_matter(rows: pl.DataFrame) -> pl.DataFrame:
    """As many as are told of, in order of harm, those among them that the format holds worst."""
    worst = pl.col("error_rank") <= WORST_HELD
    within = rows.filter((pl.col("harm_rank") <= MOST - WORST_HELD) | worst)
    kept = max(MOST - len(within), 0)
    others = rows.join(within, on=KEY, how="anti", maintain_order="left").head(kept)
    return pl.concat([within, others]).sort("harm_rank")


def _tensors(found: Diagnosis, rows: pl.DataFrame) -> list[dict[str, Any]]:
    reference = _of_reference(None if found.comparison is None else found.comparison.reference)
    zeros = zero_since(found.run.metrics)
    return [_tensor(row, found, reference, zeros.get((row["layer"], row["role"]))) for row in rows.iter_rows(named=True)]


def _tensor(
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
        "also_wrong": row["group"] == BESIDES,
        "why": why(row, found, zero),
        "since": row["onset"],
        "metric": row["metric"],
        "expected": row["expected"],
        "found": row["value"],
        "harm_rank": row["harm_rank"],
        "error_rank": None if zero is not None else row["error_rank"],
        "zero_since": zero,
        "values": values,
    }


def _of_reference(reference: Run | None) -> dict[Key, dict[str, Any]]:
    """Medians of the metrics that are shown, by tensor."""
    if reference is None:
        return {}
    return {(row["layer"], row["role"]): row for row in medians(reference, SHOWN).iter_rows(named=True)}


def _events(found: Diagnosis, tensors: list[dict[str, Any]]) -> list[Event]:
    """What findings tell, and when the other tensors that matter went out of band."""
    told = list(found.events)
    named = {(event.layer, event.role) for event in told if event.kind != "warning"}
    others = [row for row in tensors if row["since"] is not None and (row["layer"], row["role"]) not in named]
    return in_order([*told, *map(_out, others)])


def _out(row: Mapping[str, Any]) -> Event:
    kinds = {"scale_ratio_log2": "scale", "nonfinite": "nonfinite"}
    name = tensor_of(row["layer"], row["role"])
    if died(row, row["zero_since"]):
        told = f"{name}: all its values are zero"
    elif row["metric"] is None:
        told = f"{name} is out of band"
    elif row["metric"] == "nonfinite":
        told = f"{name}: NaN or infinite values"
    else:
        moved = " -> ".join(value_of(row["metric"], row[which]) for which in ("expected", "found"))
        told = f"{name}: {LABELS[row['metric']][0]} {moved}"
    return Event(row["since"], kinds.get(row["metric"], "values"), told, row["layer"], row["role"])

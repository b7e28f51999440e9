"""The process of a job: reads a request from stdin, writes its answer to stdout, and ends when stdin is closed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import joblib
import polars as pl

from ...analysis.comparison.summary import to_json
from ...analysis.diagnosis.diagnose import diagnose
from ...analysis.diagnosis.diagnosis import Diagnosis
from ...analysis.recommendation.options import Budget
from ...analysis.recommendation.recommend import Recommendation, flagged_by, over_budget, recommend
from ...analysis.recommendation.snippets import PLAN, snippets_of, unwritten
from ...analysis.replay.replay import replay
from ...analysis.runs.run import Run
from ...errors import ConfigError, RecordError, hearing
from ...record.reader import rows_of
from ..records.tables import WHAT_IF_METRICS, in_columns
from ..web.json_values import plain

#: rows of metrics that are read of each run: a million take 1.1 GB
MOST_ROWS = 2_000_000
#: rows of metrics of a record that is replayed
_MOST_REPLAYED = 8_000_000
_THINNED = (
    "The records are large: one of each {} samples was looked at, and nothing was recommended. `nemo-fp8-debug diagnose` "
    "and `recommend` look at all, with 1.1 GB of memory for a million rows of metrics."
)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not part of the answer
    answer = answered(request)
    with os.fdopen(out, "w") as file:
        json.dump(answer, file, allow_nan=False)


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """What a request comes to, as the browser gets it."""
    kinds: dict[str, Callable[..., Any]] = {"verdict": verdict, "what_if": what_if}
    try:
        with joblib.parallel_config(
            "sequential"
        ):  # for so little, others take longer to start, and one process was promised
            return {"state": "done", "result": plain(kinds[request.pop("kind")](**request))}
    except (ConfigError, RecordError) as error:
        return {"state": "failed", "error": str(error)}
    except MemoryError:
        return {"state": "failed", "error": "It takes more memory than there is; run `nemo-fp8-debug` on a larger machine."}


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # sys.stdin could not be closed at exit while it is read
        pass
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # and what this process started
    os._exit(1)


def verdict(run: str, baseline: str | None, reference: str | None, by: str) -> dict[str, Any]:
    """Compare, diagnose and recommend, as the commands of these names do.

    Raises:
        RecordError: a record is unreadable, or has nothing to go by.
    """
    records = [record for record in (run, baseline, reference) if record]
    every = max(-(-rows_of(record, "metrics") // MOST_ROWS) for record in records) or 1
    with hearing() as heard:
        runs = {record: Run.read(record, by, every=every) for record in records}
        found = diagnose(runs[run], baseline and runs[baseline], reference and runs[reference], by)
        recommendation, more = _recommended(found, run, by) if every == 1 else (None, [_THINNED.format(every)])
        comparison = None if found.comparison is None else to_json(found.comparison)
    diagnosis = found.to_json()
    diagnosis["notes"] = [*diagnosis["notes"], *dict.fromkeys(heard), *more]
    return {
        "comparison": comparison,
        "diagnosis": diagnosis,
        "recommendation": None if recommendation is None else recommendation.to_json(),
        "snippets": [] if recommendation is None else _snippets(recommendation),
    }


def _recommended(found: Diagnosis, record: str, by: str) -> tuple[Recommendation | None, list[str]]:
    """The cheapest changes, as `nemo-fp8-debug recommend` finds them; or why there are none."""
    try:
        run = found.run if by == "step" else Run.read(record)
        budget, why = Budget(), flagged_by(found) if found.baseline is not None else {}
        flagged = over_budget(run, budget) if found.baseline is None else list(why)
        recommendation = recommend(run, flagged, budget, why)
        return replace(recommendation, notes=(*recommendation.notes, *unwritten(recommendation))), []
    except (ConfigError, RecordError) as error:
        return None, [f"Nothing can be recommended: {error}."]


def _snippets(found: Recommendation) -> list[dict[str, Any]]:
    made = [asdict(snippet) for snippet in snippets_of(found)]
    if not found.plan.changes:
        return made
    plan = {"name": PLAN, "about": "the plan, for FP8PlanCallback and `nemo-fp8-debug rescue`", "text": found.plan.text()}
    return [plan | {"coarser": ()}, *made]


def what_if(run: str, step: int, recipe: str) -> dict[str, Any]:
    """Metrics of all tensors at a sampled step under another recipe, from histograms.

    Raises:
        ConfigError: the recipe is none, or histograms cannot tell.
        RecordError: there are no histograms of that step.
    """
    if (rows_there := rows_of(run, "metrics")) > _MOST_REPLAYED:
        raise RecordError(f"{run} has {rows_there:,} rows of metrics, too many to replay here; run `nemo-fp8-debug replay`")
    with hearing():
        rows = replay(run, recipe, steps=[step])
    if rows.is_empty():
        raise RecordError(f"the record has no exact histograms of step {step} to replay; record the run with histograms")
    shown = rows.select("layer", "role", "recipe", *WHAT_IF_METRICS).with_columns(in_use=pl.lit(False))
    return {"step": step, "rows": in_columns(shown)}

"""The analyses that jobs run: the verdict on a run, its headline, and a trial of a recipe on all tensors of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from ...analysis.comparison.compare import Comparison
from ...analysis.comparison.layer_matching import rename_layers_to_baseline
from ...analysis.diagnosis.diagnose import compare_for_diagnosis, diagnose, diagnose_comparison
from ...analysis.diagnosis.diagnosis import Diagnosis
from ...analysis.diagnosis.ranking import sort_rows_by_harm
from ...analysis.loss.outcome import LossOutcome
from ...analysis.runs.run import Run
from ...analysis.story.story import make_loss_headline, story
from ...analysis.story.summary import serialize_comparison, write_markdown
from ...errors import ConfigError, RecordError, capture_warnings
from ...record.parts import count_table_rows
from ..records.run_summary import WHAT_IF_METRICS, convert_rows_to_columns

if TYPE_CHECKING:  # torch takes seconds to import
    from ...analysis.recommendation.recommend import Recommendation


#: function that receives partial results
Tell = Callable[[Mapping[str, Any]], None]


def tell_nobody(partial: Mapping[str, Any]) -> None:
    """Ignore partial results, for callers that need only the whole answer."""


def compare_and_diagnose_run(
    run: str,
    baseline: str | None,
    reference: str | None,
    by: str,
    renames: Sequence[str] = (),
    tell: Tell = tell_nobody,
) -> dict[str, Any]:
    """Compare a run, diagnose it, and recommend changes, like the commands of these names. Return all results.

    Args:
        renames: rules for the run's layer names, as in `compare`.
        tell: function that receives partial results: `stage` (`loss`, `comparison`, `diagnosis`), `story` with a headline
            that gets more facts at each stage, and in the last stage `diagnosis`.

    Raises:
        RecordError: a record is unreadable, or has no sampled step.
    """
    with capture_warnings() as heard:
        told = _headline_of_losses(run, baseline, by)
        tell({"stage": "loss", "story": {"headline": told}})
        mine, good, other = _read(run, baseline, reference, by)
        if good and renames:
            mine, _ = rename_layers_to_baseline(good, mine, renames)
        found = _diagnosed(mine, good, other, by, told, tell)
        so_far = replace(found, replays=False)  # torch and SciPy take seconds to import
        tell({"stage": "diagnosis", "story": story(so_far), "diagnosis": _with_notes(so_far, heard)})
        recommendation, more = _recommend(found)
        comparison = None if found.comparison is None else _compared(found, found.comparison)
    diagnosis = _with_notes(found, heard, more)
    told = story(found)
    return {
        "story": told,
        "markdown": write_markdown(told),
        "comparison": comparison,
        "diagnosis": diagnosis,
        "recommendation": recommendation,
        "snippets": [] if recommendation is None else _list_snippets(recommendation),
    }


def diagnose_headline_only(run: str, baseline: str | None, reference: str | None, by: str) -> dict[str, Any]:
    """Diagnose a run and return only the headline. It contains no recommended changes, because these would import torch.

    Raises:
        RecordError: a record is unreadable, or has no sampled step.
    """
    with capture_warnings():
        runs = _read(run, baseline, reference, by)
        found = replace(_diagnosed(*runs, by, {}, tell_nobody), replays=False)
        told: dict[str, Any] = story(found)["headline"]
    return told


def _read(run: str, baseline: str | None, reference: str | None, by: str) -> tuple[Run, Run | None, Run | None]:
    def read(record: str | None) -> Run | None:
        return None if record is None else Run.read(record, by)

    return Run.read(run, by), read(baseline), read(reference)


def _headline_of_losses(run: str, baseline: str | None, by: str) -> dict[str, Any]:
    """Return the headline from losses alone, which are fast to read."""
    mine, theirs = (None if record is None else Run.read(record, by, held=0) for record in (run, baseline))
    assert mine is not None
    loss = LossOutcome.judge_loss(mine.loss, None if theirs is None else theirs.loss)
    return make_loss_headline(loss, mine.unit)


def _diagnosed(
    run: Run, baseline: Run | None, reference: Run | None, by: str, headline: dict[str, Any], tell: Tell
) -> Diagnosis:
    """Return the diagnosis of a run. Before that, report the comparison as a partial result."""
    if baseline is None:
        return diagnose(run, None, reference, by)
    comparison = compare_for_diagnosis(run, baseline, reference, by)
    out = comparison.tensors["onset"].drop_nulls()
    of_tensors = {"tensors": len(comparison.tensors), "out_of_band": len(out), "first_out": out.min()}
    tell({"stage": "comparison", "story": {"headline": headline | of_tensors}})
    return diagnose_comparison(comparison)


def _compared(found: Diagnosis, comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, with its tensors in the order of harm."""
    told = serialize_comparison(comparison)
    return told | {"tensors": sort_rows_by_harm(told["tensors"], found)}


def _with_notes(found: Diagnosis, heard: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    told = found.to_json()
    return told | {"notes": [*told["notes"], *dict.fromkeys(heard), *more]}


def _recommend(found: Diagnosis) -> tuple[Recommendation | None, list[str]]:
    """Return the cheapest changes, as in `nemo-fp8-debug recommend`, or None and the reason."""
    from ...analysis.recommendation.snippets import explain_missing_snippets

    try:
        recommendation = found.recommend()
        return replace(recommendation, notes=(*recommendation.notes, *explain_missing_snippets(recommendation))), []
    except (ConfigError, RecordError) as error:
        return None, [f"No change can be recommended: {error}."]


def _list_snippets(found: Recommendation) -> list[dict[str, Any]]:
    """Return the files with the changes, the plan first. Each has the keys `name`, `about`, `text` and `coarser`."""
    from ...analysis.recommendation.snippets import PLAN, make_snippets

    made = [asdict(snippet) for snippet in make_snippets(found)]
    if not found.plan.changes:
        return made
    plan = {"name": PLAN, "about": "the plan, for FP8PlanCallback and `nemo-fp8-debug rescue`", "text": found.plan.text()}
    return [plan | {"coarser": ()}, *made]


#: largest number of metric rows of a record that may be replayed here
_MOST_REPLAYED = 8_000_000


def compute_metrics_under_recipe(run: str, step: int, recipe: str) -> dict[str, Any]:
    """Compute the metrics of all tensors at a sampled step under another recipe, from histograms.

    `rounded` marks approximate metrics of float32 tensors.

    Raises:
        ConfigError: the recipe is invalid, or needs more than histograms.
        RecordError: there are no histograms of that step, or the record has too many rows.
    """
    from ...analysis.replay.replay import replay

    if (rows_there := count_table_rows(run, "metrics")) > _MOST_REPLAYED:
        raise RecordError(f"{run} has {rows_there:,} rows of metrics, too many to replay here; run `nemo-fp8-debug replay`")
    with capture_warnings():
        rows = replay(run, recipe, steps=[step])
    if rows.is_empty():
        raise RecordError(f"the record has no histograms of step {step} to replay; record the run with histograms")
    shown = rows.select("layer", "role", "recipe", *WHAT_IF_METRICS, "rounded").with_columns(in_use=pl.lit(False))
    return {"step": step, "rows": convert_rows_to_columns(shown)}

"""The job that judges a run: what its loss did, what sets it apart, why, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...analysis.comparison.compare import Comparison
from ...analysis.comparison.layer_matching import named_alike
from ...analysis.diagnosis.diagnose import comparison_of, diagnose, diagnose_comparison
from ...analysis.diagnosis.diagnosis import Diagnosis
from ...analysis.diagnosis.ranking import by_harm
from ...analysis.loss.outcome import LossOutcome
from ...analysis.runs.run import Run
from ...analysis.story.story import make_loss_headline, story
from ...analysis.story.summary import story_markdown, to_json
from ...errors import hearing
from .telling import Tell, to_nobody


def verdict(
    run: str,
    baseline: str | None,
    reference: str | None,
    by: str,
    renames: Sequence[str] = (),
    tell: Tell = to_nobody,
) -> dict[str, Any]:
    """Compare, diagnose and recommend, as the commands of these names do.

    Args:
        renames: of the run's layers, as `compare` takes them.
        tell: called with what is known so far: `stage` (`loss`, `comparison`, `diagnosis`), and `story`, whose headline is
            filled in part by part; with the last of them `diagnosis`.

    Raises:
        RecordError: a record is unreadable, or has nothing to go by.
    """
    with hearing() as heard:
        told = _headline_of_losses(run, baseline, by)
        tell({"stage": "loss", "story": {"headline": told}})
        mine, good, other = _read(run, baseline, reference, by)
        if good and renames:
            mine, _ = named_alike(good, mine, renames)
        found = _diagnosed(mine, good, other, by, told, tell)
        so_far = replace(found, replays=False)  # torch and SciPy take seconds to import
        tell({"stage": "diagnosis", "story": story(so_far), "diagnosis": _with_notes(so_far, heard)})
        from .recommended import recommended, snippets

        recommendation, more = recommended(found)
        comparison = None if found.comparison is None else _compared(found, found.comparison)
    diagnosis = _with_notes(found, heard, more)
    told = story(found)
    return {
        "story": told,
        "markdown": story_markdown(told),
        "comparison": comparison,
        "diagnosis": diagnosis,
        "recommendation": None if recommendation is None else recommendation.to_json(),
        "snippets": [] if recommendation is None else snippets(recommendation),
    }


def headline(run: str, baseline: str | None, reference: str | None, by: str) -> dict[str, Any]:
    """The headline of the same verdict without what to change, for which torch would be imported.

    Raises:
        RecordError: a record is unreadable, or has nothing to go by.
    """
    with hearing():
        runs = _read(run, baseline, reference, by)
        found = replace(_diagnosed(*runs, by, {}, to_nobody), replays=False)
        told: dict[str, Any] = story(found)["headline"]
    return told


def _read(run: str, baseline: str | None, reference: str | None, by: str) -> tuple[Run, Run | None, Run | None]:
    def read(record: str | None) -> Run | None:
        return None if record is None else Run.read(record, by)

    return Run.read(run, by), read(baseline), read(reference)


def _headline_of_losses(run: str, baseline: str | None, by: str) -> dict[str, Any]:
    """What the losses tell, which takes little to read."""
    mine, theirs = (None if record is None else Run.read(record, by, held=0) for record in (run, baseline))
    assert mine is not None
    loss = LossOutcome.of(mine.loss, None if theirs is None else theirs.loss)
    return make_loss_headline(loss, mine.unit)


def _diagnosed(
    run: Run, baseline: Run | None, reference: Run | None, by: str, headline: dict[str, Any], tell: Tell
) -> Diagnosis:
    """Tells between the comparison and the diagnosis."""
    if baseline is None:
        return diagnose(run, None, reference, by)
    comparison = comparison_of(run, baseline, reference, by)
    out = comparison.tensors["onset"].drop_nulls()
    of_tensors = {"tensors": len(comparison.tensors), "out_of_band": len(out), "first_out": out.min()}
    tell({"stage": "comparison", "story": {"headline": headline | of_tensors}})
    return diagnose_comparison(comparison)


def _compared(found: Diagnosis, comparison: Comparison) -> dict[str, Any]:
    """A comparison whose tensors are in the order of harm."""
    told = to_json(comparison)
    return told | {"tensors": by_harm(told["tensors"], found)}


def _with_notes(found: Diagnosis, heard: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    told = found.to_json()
    return told | {"notes": [*told["notes"], *dict.fromkeys(heard), *more]}

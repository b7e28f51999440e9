"""What to change in a run, as `nemo-fp8-debug recommend` finds it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ...analysis.diagnosis.diagnosis import Diagnosis
from ...analysis.recommendation.flags import flagged_by
from ...analysis.recommendation.options import Budget
from ...analysis.recommendation.recommend import Recommendation, over_budget, recommend
from ...analysis.recommendation.snippets import PLAN, snippets_of, unwritten
from ...analysis.runs.run import Run
from ...errors import ConfigError, RecordError


def recommended(found: Diagnosis, record: str, by: str) -> tuple[Recommendation | None, list[str]]:
    """The cheapest changes, as `nemo-fp8-debug recommend` finds them; or why there are none."""
    try:
        run = found.run if by == "step" else Run.read(record)
        budget, flags = Budget(), flagged_by(found) if found.baseline is not None else {}
        if by != "step":  # the stretches are of samples, and the run is read by steps
            flags = {key: replace(flag, out=None) for key, flag in flags.items()}
        flagged = over_budget(run, budget) if found.baseline is None else list(flags)
        recommendation = recommend(run, flagged, budget, flags)
        return replace(recommendation, notes=(*recommendation.notes, *unwritten(recommendation))), []
    except (ConfigError, RecordError) as error:
        return None, [f"Nothing can be recommended: {error}."]


def snippets(found: Recommendation) -> list[dict[str, Any]]:
    """The files that make the changes, the plan first: name, about, text, coarser."""
    made = [asdict(snippet) for snippet in snippets_of(found)]
    if not found.plan.changes:
        return made
    plan = {"name": PLAN, "about": "the plan, for FP8PlanCallback and `nemo-fp8-debug rescue`", "text": found.plan.text()}
    return [plan | {"coarser": ()}, *made]

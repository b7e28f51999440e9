"""What to change in a run, as `nemo-fp8-debug recommend` finds it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ...analysis.diagnosis.diagnosis import Diagnosis
from ...analysis.recommendation.recommend import Recommendation
from ...analysis.recommendation.snippets import PLAN, snippets_of, unwritten
from ...errors import ConfigError, RecordError


def recommended(found: Diagnosis) -> tuple[Recommendation | None, list[str]]:
    """Return the cheapest changes, as `nemo-fp8-debug recommend` finds them; or why there are none."""
    try:
        recommendation = found.recommend()
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

"""Recommendations from records by their paths, as `nemo-fp8-debug recommend` and Python users ask for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...core.keys import Key
from ..diagnosis.diagnose import diagnose
from ..runs.run import Run
from .options import Budget
from .recommend import Recommendation, flagged_by, over_budget
from .recommend import recommend as recommend_for


def recommend(
    run: str | os.PathLike[str] | Run,
    baseline: str | os.PathLike[str] | Run | None = None,
    operands: Sequence[Key] | None = None,
    budget: Budget | None = None,
) -> Recommendation:
    """The cheapest change for each operand that loses too much.

    Args:
        run: the record of the run to fix; any fsspec address.
        baseline: the record of a run that went well: only operands that left its band before the loss diverged are changed.
        operands: (layer, role) of those to look at instead; role `input`, `weight` or `grad_output`.
        budget: what an operand may lose: a relative error of 0.06, 1% underflow and 0.01% overflow, unless given.

    Returns:
        What to change, with the errors before and after; `.plan` is what `apply_plan` and `FP8PlanCallback` take.

    Raises:
        RecordError: a record is missing or unreadable, has no sampled step, or has no such operand.

    Example:
        >>> found = recommend("runs/bad", operands=[("layers.0.fc2", "input")])
        >>> [(change.layer, change.recipe) for change in found.plan.changes]
        [('layers.0.fc2', 'current-e5m2')]
    """
    budget = budget or Budget()
    if baseline is None:
        examined = run if isinstance(run, Run) else Run.read(run)
        why: dict[Key, str] = {}
        flagged = list(operands) if operands else over_budget(examined, budget)
    else:
        found = diagnose(run, baseline)
        examined, why = found.run, flagged_by(found)
        flagged = list(operands) if operands else list(why)
    return recommend_for(examined, flagged, budget, why)

"""Recommendations from records by their paths, as `nemo-fp8-debug recommend` and Python users ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.keys import Key
from ..recommendation.options import Budget
from ..recommendation.recommend import Recommendation
from .diagnose import Source, diagnose


def recommend(
    run: Source,
    baseline: Source | Sequence[Source] | None = None,
    operands: Sequence[Key] | None = None,
    budget: Budget | None = None,
) -> Recommendation:
    """Return the cheapest change for each operand that loses too much.

    Args:
        run: the record of the run to fix, or a folder above it; a path or any fsspec address.
        baseline: the record of a run that went well, or of several, as of `diagnose`. With it, only operands that
            left its band before the loss diverged are changed; without it, all that exceed the budget. None are changed
            if something other than FP8 is to blame.
        operands: operands to look at instead, a list of (layer, role); a role is `input`, `weight` or `grad_output`.
        budget: what an operand may lose; None: `Budget()`.

    Returns:
        What to change: `.plan` is what `apply_plan` and `FP8PlanCallback` take, `.findings` has each operand's errors before
        and after, `.to_json()` everything as plain values.

    Raises:
        RecordError: a record is missing or unreadable, has no sampled step, or has no such operand.

    Example:
        >>> found = recommend("runs/bad", operands=[("layers.0.fc2", "input")])
        >>> [(change.layer, change.recipe) for change in found.plan.changes]
        [('layers.0.fc2', 'current-e5m2')]
    """
    return diagnose(run, baseline).recommend(budget, operands)

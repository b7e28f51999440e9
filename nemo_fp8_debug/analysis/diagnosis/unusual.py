"""What rules find in a run, and not in another one that went well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..runs.run import Run
from .rules.finding import CONFIDENCE, Finding

Rule = Callable[[Run, Run | None], Iterable[Finding]]


def unusual(rule: Rule, run: Run, baseline: Run | None, others: Sequence[Run] = ()) -> list[Finding]:
    """What a rule finds in a run and, beside the same baseline, in none of its other baselines.

    Example: the gradient norm moves to another level in the run, and in a second run that went well, too.
    """
    found = list(rule(run, baseline))
    usual = [f for other in others for f in rule(other, baseline)] if found else []
    return [f for f in found if not any(_as_sure(f, each) for each in usual)]


def _as_sure(found: Finding, usual: Finding) -> bool:
    """Whether the second says the same of the same tensor, no less surely."""
    same = all(getattr(found, name) == getattr(usual, name) for name in ("rule", "cause", "layer", "role"))
    sure = CONFIDENCE.index(usual.confidence) <= CONFIDENCE.index(found.confidence)
    return same and sure and usual.severity >= found.severity

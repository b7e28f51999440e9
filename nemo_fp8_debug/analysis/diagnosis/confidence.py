"""How often verdicts of a kind are right: measured on runs whose cause is known.

`confidence.json` counts, by cause and with or without a baseline, how many verdicts of the benchmark were right.
`scripts/validation/fault_injection/fit_confidence.py` makes it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from .. import thresholds
from .decide import Decision

#: confidence of a cause that the benchmark has too few verdicts of
_UNMEASURED = "medium"
_FEWEST = 20


def measure_confidence(decision: Decision, paired: bool) -> str | None:
    """Return `high`, `medium` or `low`, or None if nothing was found: absence of evidence gets no confidence.

    Args:
        paired: whether there is a baseline.
    """
    if decision.cause in ("none", "unknown"):
        return None
    if decision.finding is not None and decision.finding.strength != "clear":
        return "high" if decision.finding.strength == "proof" else "low"
    right, count = _read_counts().get(f"{decision.cause}, {'paired' if paired else 'alone'}", (0, 0))
    if count < _FEWEST:
        return _UNMEASURED
    share = right / count
    return "high" if share >= thresholds.HIGH else "medium" if share >= thresholds.MEDIUM else "low"


@cache
def _read_counts() -> dict[str, tuple[int, int]]:
    counts = json.loads(files(__package__).joinpath("confidence.json").read_text(encoding="utf-8"))
    return {name: (each["right"], each["verdicts"]) for name, each in counts.items()}

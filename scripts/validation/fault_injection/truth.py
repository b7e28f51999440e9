"""What is true of a run: what was wrong with it, and whether that harmed it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fault_injection.cases import Case

#: part of the counterpart's loss by which a run's is above it, in the mean over the last steps, when a fault has done harm
HARM, LAST = 0.02, 60
#: steps up to each step that its loss is averaged over, to say since when it has left
_BACK = 20


def truth(case: Case, losses: Sequence[float], counterpart: Sequence[float]) -> dict[str, Any]:
    """As it is kept beside the record.

    Args:
        losses: of the run.
        counterpart: of the same run without the fault, batch by batch the same.
    """
    gap, since = gap_of(np.array(losses), np.array(counterpart))
    fault = case.fault
    return {
        "name": case.name,
        **asdict(case.setup),
        "kind": fault.kind,
        "culprits": [list(culprit) for culprit in fault.culprits],
        "onset": fault.onset,
        "fault": fault.described(),
        "counterpart": case.counterpart,
        "gap_pct": 100 * gap if math.isfinite(gap) else None,
        "harmful": gap > HARM,
        "diverges_at": since,
        "steps": len(losses),
    }


def gap_of(mine: np.ndarray, other: np.ndarray) -> tuple[float, int | None]:
    """Of the losses at the end, a part of the magnitude of the counterpart's, infinite where a loss there is not finite; and
    since when it is more than HARM; None: it is not."""
    other = other[: len(mine)]
    mine = np.where(np.isfinite(mine), mine, np.inf)
    gap = float((mine[-LAST:].mean() - other[-LAST:].mean()) / abs(other[-LAST:].mean()))
    if gap <= HARM:
        return gap, None
    apart = np.minimum(mine, 1e9) - other - HARM * np.abs(other)
    until = np.convolve(apart, np.ones(_BACK))[: len(mine)]
    since = np.cumsum(apart[::-1])[::-1]
    left = np.flatnonzero((until > 0) & (since > 0))
    return gap, int(left[0]) if len(left) else None

"""What is true of each run: what was wrong with it, and how far that moved its loss, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fault_injection.right_causes import right_causes
from fault_injection.truth import HARM, LAST, truth
from scipy.stats import t as student

from held_out.plan import HeldOutRun
from held_out.strengths import is_slight

#: steps of a block, over which noise of the loss is taken for independent
_BLOCK = 5
_LEVEL = 0.975


@dataclass(frozen=True)
class Gap:
    """How far a run's mean loss over the last steps lies above its counterpart's, in percent of the magnitude of that."""

    mean: float
    #: half of the interval's width that the steps of the two runs give
    within: float

    @classmethod
    def between(cls, mine: Sequence[float], other: Sequence[float]) -> Gap | None:
        """Compare two runs with the same batches; None if a loss at the end is not finite."""
        steps = min(LAST, len(mine)) // _BLOCK * _BLOCK
        ends = np.array(mine[-steps:]), np.array(other[len(mine) - steps : len(mine)])
        if not all(np.isfinite(end).all() for end in ends):
            return None
        apart = 100 * (ends[0] - ends[1]) / abs(ends[1].mean())
        blocks = apart.reshape(-1, _BLOCK).mean(axis=1)
        error = blocks.std(ddof=1) / math.sqrt(len(blocks))
        return cls(float(apart.mean()), float(student.ppf(_LEVEL, len(blocks) - 1) * error))


def measure_chaos(runs: Sequence[HeldOutRun], losses: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, int]]:
    """Return by family how far gaps reach if nothing is wrong, in percent, and how many pairs of runs say so.

    The runs of a pair have the same batches, and weights that differ by 2^-9 of themselves.
    """
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.is_near and run.name in losses and run.counterpart in losses:
            gap = Gap.between(losses[run.name], losses[run.counterpart])
            if gap is not None:
                found.setdefault(run.setup.family, []).append(gap.mean)
    return {
        name: (float(student.ppf(_LEVEL, len(gaps)) * np.sqrt(np.mean(np.square(gaps)))), len(gaps))
        for name, gaps in found.items()
    }


def find_truth(
    run: HeldOutRun, losses: Sequence[float], counterpart: Sequence[float], chaos: tuple[float, int]
) -> dict[str, Any]:
    """Return what is true of a run.

    `harmed` is `yes` or `no` if the whole interval of the gap lies on one side of 2%, and `too close` otherwise. The
    interval has two sources: noise of the last steps, and what any change of the run's last bits does to it.

    Args:
        run: as it was drawn.
        losses: of the run.
        counterpart: of the same run without the fault, batch by batch the same.
        chaos: of its family, as `measure_chaos` returns it.
    """
    told = truth(run, losses, counterpart)
    gap, effect = Gap.between(losses, counterpart), find_effect(losses, counterpart)
    told |= {key: value for key, value in run.describe().items() if key not in ("steps", "kind", "fault")}
    told |= {"planned_steps": run.schedule.steps, "effect_since": effect, "part": f"group-{run.group:02d}"}
    told["gap_interval_pct"] = None
    told["harmed"] = "yes"
    if gap is not None:
        reach = math.hypot(gap.within, chaos[0]) if effect is not None else 0.0
        low, high = gap.mean - reach, gap.mean + reach
        told["gap_interval_pct"] = [low, high]
        told["harmed"] = "yes" if low > 100 * HARM else "no" if high <= 100 * HARM else "too close"
    told |= {"chaos_pct": chaos[0], "chaos_pairs": chaos[1]}
    told |= {"loss_first": _mean(counterpart[:10]), "loss_last": _mean(counterpart[-LAST:])}
    told["slight"] = is_slight(run.fault)
    told["causes"] = list_right_causes(told) if run.is_faulted else ["none"]
    return told


def list_right_causes(told: Mapping[str, Any]) -> list[str]:
    """Return what a verdict may call the cause: what the benchmark's `right_causes` says.

    That nothing is wrong is right, too, if the fault is slight or no loss shows it.
    """
    causes = right_causes(told, told["interval"])
    return sorted(causes | ({"none"} if told["slight"] or told["effect_since"] is None else set()))


def find_effect(mine: Sequence[float], other: Sequence[float]) -> int | None:
    """Return the first step whose loss differs in any bit; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)


def _mean(losses: Sequence[float]) -> float:
    return float(np.mean(losses))

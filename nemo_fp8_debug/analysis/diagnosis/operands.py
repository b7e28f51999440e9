"""Which operands are looked into, and why each is out of the band."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from ...core.scale_sources import QUANTIZED
from ..comparison.compare import quantized, split_experts
from ..comparison.onset import onsets
from ..runs.run import Run
from .rules.beyond import beyond
from .rules.finding import Finding
from .rules.operand import Course, why

#: operands that are looked into
_LOOKED_INTO = 8
#: part of the strongest excess that makes another strong too: of those the first in time counts
_STRONG = 0.2
#: part of a run's samples that the rest is compared with where there is no baseline, and how many those must be
_BEGINNING, _FEW = 0.25, 6
_KEY = ["layer", "role"]
#: causes that need no other run to be seen
_PLAIN = ("nonfinite", "dead")


def against_baseline(run: Run, baseline: Run, out_of_band: pl.DataFrame) -> list[Finding]:
    """Why operands are out of a baseline's band, as in `onsets`: strong ones by onset, then others."""
    found = []
    for layer, role, since, excess in _first(out_of_band, run):
        cause = why(Course.of(run.metrics, layer, role), since, Course.of(baseline.metrics, layer, role))
        found.append(replace(cause, excess=excess))
    # What the run alone has, or the run alone in FP8, has nothing to be compared with.
    only = run.metrics.join(baseline.metrics.select(_KEY).unique(), on=_KEY, how="anti")
    far = split_experts(beyond(quantized(only)))[0] if len(only) else only.clear()
    found += [replace(f, confidence="medium") for f in (_alone(run, far) if len(far) else [])]
    return _that_count(run, found)


def alone(run: Run) -> list[Finding]:
    """What operands of a run without a baseline show.

    Those that are beyond what any healthy operand does come first, with medium confidence. That an operand is not what it
    was in the run's first quarter, where it warms up, is a hint.
    """
    usual, judged = beginning(run.metrics), quantized(run.metrics)
    far = split_experts(beyond(judged))[0]
    moved = split_experts(onsets(usual, judged if len(usual) else judged.clear()))[0]
    moved = moved.join(far, on=_KEY, how="anti", maintain_order="left")
    surely = [replace(f, confidence="medium") for f in _alone(run, far)]
    hints = [f if f.cause in _PLAIN else replace(f, confidence="low") for f in _alone(run, moved)]
    return _that_count(run, [*surely, *hints][:_LOOKED_INTO])


def _alone(run: Run, rows: pl.DataFrame) -> list[Finding]:
    courses = [(Course.of(run.metrics, layer, role), since, excess) for layer, role, since, excess in _first(rows, run)]
    return [replace(why(course, since), excess=excess) for course, since, excess in courses]


def beginning(metrics: pl.DataFrame) -> pl.DataFrame:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    steps = metrics["step"].unique().sort()
    n = round(len(steps) * _BEGINNING)
    if n < _FEW:
        return metrics.clear()
    stretch = (steps[-1] - steps[0]) / (steps[n - 1] - steps[0])
    spread = (pl.lit(steps[0]) + (pl.col("step") - steps[0]) * stretch).round().cast(pl.Int64)
    return metrics.filter(pl.col("step") <= steps[n - 1]).with_columns(step=spread)


def _first(out_of_band: pl.DataFrame, run: Run) -> list[tuple[str, str, int, float]]:
    """layer, role, onset, excess: of the strong ones by onset, and of others, as many as are looked into."""
    tensors = out_of_band.group_by(_KEY, maintain_order=True).agg(pl.col("onset").min(), pl.col("excess").max())
    order = run.metrics.select(*_KEY, onset="step", order="nonfinite_order")
    tensors = tensors.join(order, on=[*_KEY, "onset"], how="left", maintain_order="left")
    tensors = tensors.with_columns(weak=pl.col("excess") < _STRONG * pl.col("excess").max())
    ordered = tensors.sort("weak", "onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True)
    return ordered.head(_LOOKED_INTO).select(*_KEY, "onset", "excess").rows()


def _that_count(run: Run, found: list[Finding]) -> list[Finding]:
    """Without what a recipe would make of operands, which has done no harm; NaN behind the loss is less sure."""
    lost = run.loss.steps[~np.isfinite(run.loss.losses)]
    found = [_behind_the_loss(f, int(lost[0])) if len(lost) else f for f in found]
    return found if run.quantization == QUANTIZED else [f for f in found if f.cause in _PLAIN]


def _behind_the_loss(found: Finding, lost: int) -> Finding:
    """NaN from a step on at which the loss was NaN already is everywhere."""
    if found.cause != "nonfinite" or found.since is None or found.since <= lost:
        return found
    return replace(found, confidence="low", may_follow_the_loss=True)

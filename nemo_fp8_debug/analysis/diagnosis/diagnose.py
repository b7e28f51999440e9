"""What is wrong with a run: rules that each print their evidence, and what they add up to. "Cannot tell" is an answer."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import polars as pl

from ...core.scale_sources import QUANTIZED
from ...errors import RecordError
from ..comparison.compare import compare, quantized, split_experts
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW, onsets
from ..loss.outcome import MAX_GAP, LossOutcome
from ..runs.run import Run
from .culprit import Evidence, blamed
from .diagnosis import Diagnosis
from .rules.divergence import diverged_at_the_start, divergence
from .rules.finding import Finding
from .rules.grad_scale import multiplier
from .rules.learning_rate import learning_rate
from .rules.nonfinite import nonfinite
from .rules.operand import Course, why
from .rules.optimizer_steps import optimizer_steps, stopped_at
from .rules.outputs import reach
from .rules.settings import settings
from .rules.spikes import compared

#: operands that are looked into, the first to leave
_LOOKED_INTO = 8
#: part of a run's samples that the rest is compared with where there is no baseline, and how many those must be
_BEGINNING, _FEW = 0.25, 6


def diagnose(
    run: str | os.PathLike[str] | Run,
    baseline: str | os.PathLike[str] | Run | None = None,
    reference: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        run: the record of the run to explain, or a folder above it; a path or any fsspec address.
        baseline: likewise, of a run that went well; None: the run is compared with its own beginning.
        reference: likewise, of a run that differs from `run` in precision alone; None: there is none.
        by: what the runs are matched by: `step`, or `samples` that were consumed, for runs of other batch sizes.
        max_gap: percent that the mean loss over the last part may lie above the baseline's before it counts as harm.

    Returns:
        What was found: `harm`, `cause`, `confidence`, `culprit`, each rule's `findings`, and `verdict()` in sentences.

    Raises:
        RecordError: a record is missing or unreadable, or has nothing to go by.
        ConfigError: `by` is neither.

    Example:
        >>> found = diagnose("runs/bad", "runs/baseline", "runs/reference")
        >>> found.harm, found.cause, found.divergence_step
        ('harmful', 'software', 61)
    """
    other = reference if reference is None or isinstance(reference, Run) else Run.read(reference, by)
    mine = _read(run, by)
    if baseline is None:
        return _alone(mine, other, max_gap)
    return _paired(compare(_read(baseline, by), mine, other, by, max_gap=max_gap))


def _read(path: str | os.PathLike[str] | Run, by: str) -> Run:
    return (path if isinstance(path, Run) else Run.read(path, by)).without_skipped()


def _paired(comparison: Comparison) -> Diagnosis:
    baseline, reference, loss = comparison.baseline, comparison.reference, comparison.loss
    reference_since = None
    if reference is not None:
        reference_since = LossOutcome(reference.loss, loss.baseline, loss.max_gap).harmful_since
    return _added_up(comparison.run, baseline, comparison, comparison.out_of_band, loss, reference_since)


def _alone(run: Run, reference: Run | None, max_gap: float) -> Diagnosis:
    if run.metrics.is_empty():
        raise RecordError(f"{run.path} has no sampled step, so there is nothing to go by")
    loss = LossOutcome.of(run.loss, None if reference is None else reference.loss, max_gap)
    if loss.harmful_since is None:
        own = LossOutcome(run.loss, None, max_gap)
        loss = own if own.harmful_since is not None else loss
    usual = beginning(run.metrics)
    out_of_band = onsets(usual, quantized(run.metrics) if len(usual) else run.metrics.clear())
    since = None if reference is None else LossOutcome(reference.loss, None, max_gap).harmful_since
    return _added_up(run, None, None, split_experts(out_of_band)[0], loss, since)


def beginning(metrics: pl.DataFrame) -> pl.DataFrame:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    steps = metrics["step"].unique().sort()
    n = round(len(steps) * _BEGINNING)
    if n < _FEW:
        return metrics.clear()
    stretch = (steps[-1] - steps[0]) / (steps[n - 1] - steps[0])
    spread = (pl.lit(steps[0]) + (pl.col("step") - steps[0]) * stretch).round().cast(pl.Int64)
    return metrics.filter(pl.col("step") <= steps[n - 1]).with_columns(step=spread)


def _added_up(
    run: Run,
    baseline: Run | None,
    comparison: Comparison | None,
    out_of_band: pl.DataFrame,
    loss: LossOutcome,
    reference: int | None,
) -> Diagnosis:
    """
    Args:
        out_of_band: operands out of the band, as in `onsets`.
        reference: step from which the reference run's loss diverges.
    """
    stopped = stopped_at(run)
    harmed_since = min((step for step in (loss.harmful_since, stopped) if step is not None), default=None)
    operands, start = _operands(run, baseline, out_of_band), diverged_at_the_start(run.loss, harmed_since)
    findings = [
        *divergence(loss, run.unit, reference),
        *learning_rate(run, baseline),
        *optimizer_steps(run, baseline),
        *nonfinite(run, baseline),
        *settings(run.fingerprint, baseline.fingerprint if baseline else None, start),
        *filter(None, [compared(run.loss, baseline.loss if baseline else None, run.unit)]),
        *multiplier(run, baseline),
        *operands,
    ]
    latest = None if harmed_since is None else harmed_since + _interval(run.metrics)
    findings += filter(None, [reach(f, run.outputs, baseline.outputs if baseline else None) for f in operands[:1]])
    evidence = Evidence(findings, harmed_since, latest, _judged(run, baseline, latest), baseline is not None)
    return Diagnosis(run, baseline, comparison, findings, blamed(evidence), loss, stopped)


def _operands(run: Run, baseline: Run | None, out_of_band: pl.DataFrame) -> list[Finding]:
    """Why each of the first operands to leave did."""
    firsts = out_of_band.unique(["layer", "role"], keep="first", maintain_order=True)
    order = run.metrics.select("layer", "role", onset="step", order="nonfinite_order")
    firsts = firsts.join(order, on=["layer", "role", "onset"], how="left", maintain_order="left")
    firsts = firsts.sort("onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True).head(_LOOKED_INTO)
    found = []
    for layer, role, since in firsts.select("layer", "role", "onset").rows():
        reference = Course.of(baseline.metrics, layer, role) if baseline else None
        cause = why(Course.of(run.metrics, layer, role), since, reference)
        # The beginning of a run, where it warms up, is a poor baseline.
        found.append(replace(cause, confidence="low") if baseline is None and cause.confidence == "medium" else cause)
    lost = run.loss.steps[~np.isfinite(run.loss.losses)]
    found = [_behind_the_loss(f, int(lost[0])) if len(lost) else f for f in found]
    # What a recipe would make of operands has done no harm.
    return found if run.quantization == QUANTIZED else [f for f in found if f.cause in ("nonfinite", "dead")]


def _behind_the_loss(found: Finding, lost: int) -> Finding:
    """NaN from a step on at which the loss was NaN already is everywhere."""
    if found.cause != "nonfinite" or found.since is None or found.since <= lost:
        return found
    return replace(found, confidence="low", may_follow_the_loss=True)


def _interval(metrics: pl.DataFrame) -> int:
    """Steps between samples."""
    between = metrics["step"].unique().sort().diff().median()
    return int(between) if isinstance(between, (int, float)) else 0


def _judged(run: Run, baseline: Run | None, latest: int | None) -> bool:
    """Whether there are samples enough to see an operand leave before the loss does."""
    known = pl.col("relative_error").is_not_null() | (pl.col("nan") + pl.col("inf") > 0)
    steps = run.metrics.filter(known)["step"].unique().sort()
    if baseline is None:
        return not beginning(run.metrics).is_empty()
    first, last = baseline.metrics["step"].min(), baseline.metrics["step"].max()
    if latest is not None:
        steps = steps.filter(steps <= latest)
    return int(steps.is_between(first, last).sum()) >= IN_A_ROW

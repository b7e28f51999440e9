"""Rules about the loss: its level, the loss of the reference run, and steps that the optimizer skips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ....core.text import format_number
from ... import thresholds
from ...loss.curve import LossCurve
from ...loss.outcome import OF_RANGE
from ...runs.run import Run
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule


@register_rule("reference", ("software",), (), event="reference")
def find_reference(facts: Facts) -> Iterator[Finding]:
    """Exclude precision as the cause if a BF16 run that is otherwise equal fails in the same way.

    Example: the learning rate breaks both the run and the BF16 run.
    """
    other = facts.loss.reference_outcome
    if other is None or facts.loss.harm_onset_step is None:
        return
    if other.harm_onset_step is not None or facts.loss.differs_from_reference is False:
        evidence = "the reference run in higher precision does the same"
        advice = "Look at learning rate, data, kernels and communication."
        yield Finding("reference", "software", "clear", evidence, since=other.harm_onset_step, advice=advice, is_exact=True)


@register_rule("level", ("software",), (), event="loss")
def find_level(facts: Facts) -> Iterator[Finding]:
    """Name a loss that goes up to another level and stays there, in a run without a baseline.

    Example: labels are shifted by one from step 83 on, so the loss goes up by 281%.
    """
    loss = facts.loss.run
    if facts.paired or facts.loss.is_negative_from_zero or loss.level_shift is None:
        return
    step, percent = loss.level_shift
    if not _is_abrupt(loss, step):
        return
    scale = loss.measure_percent_base_before(step)
    unit = OF_RANGE if scale is not None and scale.is_range else ""
    evidence = f"the loss goes up by {format_number(percent)}%{unit} around {facts.unit} {step} and stays there"
    advice = "Look at what changed around then: data, labels, masks, the loss function, the batch size, a resumed state."
    yield Finding("level", "software", "clear", evidence, since=step, advice=advice, slack=loss.half)


def _is_abrupt(loss: LossCurve, step: int) -> bool:
    """Return True if most of a rise near a step happens within a few losses. A divergence takes longer."""
    at, half, few = int(np.searchsorted(loss.steps, step)), loss.half, thresholds.STEPS_IN_A_ROW
    before, after = loss.losses[max(at - half, 0) : at], loss.losses[at : at + half]
    around = pl.Series(loss.losses[max(at - half - few, 0) : at + half + few])
    medians = around.rolling_median(few).drop_nulls().to_numpy()
    if len(medians) <= few or not (np.isfinite(before).any() and np.isfinite(after).any()):
        return True
    rise = np.nanmedian(after) - np.nanmedian(before)
    with np.errstate(invalid="ignore"):  # the difference of two infinite medians is invalid
        return bool(np.nanmax(medians[few:] - medians[:-few]) >= thresholds.ABRUPT_PART * rise)


@define_fact
def resumes(records: DiagnosedRecords) -> list[int]:
    """Return the first step of each attempt except the first attempt."""
    rows = records.run.steps.select("step", "attempt").drop_nulls()
    firsts = rows.group_by("attempt").agg(pl.col("step").min()).sort("attempt")["step"].to_list()
    return [int(step) for step in firsts[1:]]


# Skipped steps ----------------------------------------------------------------------------------------------------------


class SkippedSteps(NamedTuple):
    """A table of the run with columns step and skipped, and the share of steps that are skipped in the baseline."""

    run: pl.DataFrame
    usual: float


@define_fact
def skipped_steps(records: DiagnosedRecords) -> SkippedSteps:
    """Return the steps that the optimizer skipped, as reported by the framework."""
    usual = None if records.baseline is None else _flags(records.baseline)["skipped"].mean()
    return SkippedSteps(_flags(records.run), usual if isinstance(usual, float) else 0.0)


@register_rule("skipped steps", ("skipped",), (skipped_steps,), event="optimizer")
def find_skipped(facts: Facts) -> Iterator[Finding]:
    """Name an optimizer that skips all steps from some step on, or that skips many steps.

    Example: the backward pass overflows in float16, so the optimizer skips all steps from step 60 on.
    """
    flags, usual = skipped_steps(facts)
    n = int(flags["skipped"].sum())
    since = find_permanent_skips(flags)
    if since is not None:
        evidence = f"the optimizer takes no step from {facts.unit} {since} on; {n} of {len(flags)} are skipped"
        yield Finding("skipped steps", "skipped", "clear", evidence, since=since, is_exact=True)
    elif n >= thresholds.STEPS_IN_A_ROW and n > (thresholds.SKIPPED_SHARE + usual) * len(flags):
        evidence = f"{n} of {len(flags)} steps are skipped" + (
            f", and {usual:.0%} of the baseline's" if facts.paired else ""
        )
        yield Finding("skipped steps", "skipped", "hint", evidence, since=int(flags.filter("skipped")["step"][0]))


def find_permanent_skips(flags: pl.DataFrame) -> int | None:
    """Return the first step from which the optimizer skips all steps, or None if there is no such step.

    Args:
        flags: table with step and skipped.
    """
    taken = np.flatnonzero(~flags["skipped"].to_numpy())
    first = int(taken[-1]) + 1 if len(taken) else 0
    return int(flags["step"][first]) if len(flags) - first >= thresholds.STEPS_IN_A_ROW else None


def _flags(run: Run) -> pl.DataFrame:
    rows = run.steps.select("step", pl.col("skipped").fill_nan(None)).drop_nulls().unique("step", keep="last")
    return rows.with_columns(pl.col("skipped") != 0).sort("step")

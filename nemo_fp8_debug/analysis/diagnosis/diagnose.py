"""What is wrong with a run: rules that each print their evidence, and what they add up to. "Cannot tell" is an answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from ...errors import RecordError
from ..comparison.compare import compare, experts_apart, quantised
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW, onsets
from ..runs.run import Run
from .culprit import Blame, blamed
from .rules.divergence import departure, left_at_the_start, told_by
from .rules.finding import CAUSES, Finding
from .rules.grad_scale import multiplier
from .rules.operand import Course, why
from .rules.outputs import reach
from .rules.settings import settings
from .rules.spikes import compared

#: operands that are looked into, the first to leave
_LOOKED_INTO = 8
#: part of a run's samples that the rest is compared with where there is no good run, and how many those must be
_BEGINNING, _FEW = 0.25, 6


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what it adds up to."""

    bad: Run
    good: Run | None
    #: with a good run only
    comparison: Comparison | None
    #: all that rules found, those of operands by onset
    findings: Sequence[Finding]
    blame: Blame
    #: step from which the loss stays above the good run's, or else above its own minimum; None: it does not
    loss_left: int | None

    @property
    def culprit(self) -> Finding | None:
        """The operand that it began in; None: none, or it cannot be told."""
        return self.blame.culprit

    @property
    def cause(self) -> str:
        """One of CAUSES."""
        return self.blame.cause

    @property
    def confidence(self) -> str:
        """Of the cause, one of CONFIDENCE."""
        return self.blame.confidence

    @property
    def harm(self) -> str:
        """`harmful`: the loss has left; `harmless so far`: something is out of order and the loss stays; `none`; `unknown`
        without losses."""
        if not told_by(self.bad.loss):
            return "unknown"
        if self.loss_left is not None:
            return "harmful"
        return "none" if self.cause in ("none", "unknown") else "harmless so far"

    @property
    def notes(self) -> Sequence[str]:
        """What to bear in mind about the comparison with the good run."""
        return () if self.comparison is None else self.comparison.notes

    @property
    def lead(self) -> int | None:
        """Steps from the culprit's onset to the loss's; None where either is missing."""
        if self.culprit is None or self.culprit.since is None or self.loss_left is None:
            return None
        return self.loss_left - self.culprit.since

    def verdict(self) -> str:
        """In a sentence or four."""
        told = {
            "harmful": f"The loss diverges at {self.bad.unit} {self.loss_left}.",
            "harmless so far": "The loss stays: what follows is harmless so far.",
            "none": "The loss stays.",
            "unknown": "There are too few losses to tell harm by.",
        }
        sentences = [told[self.harm], self._cause_told()]
        if self.harm in ("none", "harmless so far"):
            sentences.append(
                "If downstream scores are bad all the same, look at what inference reads: `nemo-fp8-debug audit` shows the "
                "scales and weights of a checkpoint."
            )
        return " ".join(sentences)

    def _cause_told(self) -> str:
        unit, sure = self.bad.unit, f"{self.confidence} confidence"
        if self.culprit is not None:
            lead = "" if self.lead is None else f", {abs(self.lead)} {unit}s {'before' if self.lead >= 0 else 'after'} it"
            where = f"{self.culprit.operand} at {unit} {self.culprit.since}{lead}"
            return f"It begins in {where}: {CAUSES[self.cause]} ({sure}; {self.culprit.evidence})."
        if self.cause == "none":
            return f"Nothing is wrong that the record can tell ({sure})."
        if self.cause == "unknown":
            return (
                "The record cannot tell why."
                if self.harm == "harmful"
                else "The record cannot tell whether anything is wrong."
            )
        told = CAUSES[self.cause]
        return f"{told[0].upper()}{told[1:]} ({sure})."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict(),
            "notes": list(self.notes),
            "cause": self.cause,
            "confidence": self.confidence,
            "harm": self.harm,
            "loss_left": self.loss_left,
            "lead": self.lead,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose(
    bad: str | os.PathLike[str] | Run,
    good: str | os.PathLike[str] | Run | None = None,
    twin: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        bad: a record; or a run that has been read, with the same `by` and all columns. Likewise the others.
        good: a run that went well; without it the run is compared with its own beginning.
        twin: a run that differs from `bad` in precision alone.
        by: see `compare`.

    Raises:
        RecordError: a record is missing or unreadable, or has nothing to go by.
        ConfigError: see `compare`.
    """
    other = twin if twin is None or isinstance(twin, Run) else Run.read(twin, by)
    if good is None:
        return _alone(_read(bad, by), other)
    return _paired(compare(_read(good, by), _read(bad, by), other, by))


def _read(path: str | os.PathLike[str] | Run, by: str) -> Run:
    """A run without the samples of steps that the optimizer skipped, as long as it stepped later: gradients that overflow
    while a loss scale is sought have changed nothing."""
    run = path if isinstance(path, Run) else Run.read(path, by)
    steps = run.steps.with_columns(skipped=pl.col("skipped").fill_null(0) != 0)
    last = pl.col("step").filter(~pl.col("skipped")).max()
    made_good = steps.filter(pl.col("skipped") & (pl.col("step") < last))["step"]
    return replace(run, figures=run.figures.filter(~pl.col("step").is_in(made_good.implode())))


def _paired(comparison: Comparison) -> Diagnosis:
    bad, good, twin = comparison.bad, comparison.good, comparison.twin
    above = told_by(good.loss)
    loss_left = comparison.loss_left if above else bad.loss.diverged_at
    twin_since = None
    if twin is not None:
        twin_since = twin.loss.above(good.loss) if above else twin.loss.diverged_at
    return _added_up(bad, good, comparison, comparison.left, loss_left, twin_since)


def _alone(bad: Run, twin: Run | None) -> Diagnosis:
    if bad.figures.is_empty():
        raise RecordError(f"{bad.path} has no sampled step, so there is nothing to go by")
    since = [bad.loss.diverged_at, None if twin is None else bad.loss.above(twin.loss)]
    loss_left = min((step for step in since if step is not None), default=None)
    reference = beginning(bad.figures)
    left = _nonfinite(bad.figures) if reference.is_empty() else onsets(reference, quantised(bad.figures))
    return _added_up(bad, None, None, experts_apart(left)[0], loss_left, None if twin is None else twin.loss.diverged_at)


def beginning(figures: pl.DataFrame) -> pl.DataFrame:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    steps = figures["step"].unique().sort()
    n = round(len(steps) * _BEGINNING)
    if n < _FEW:
        return figures.clear()
    stretch = (steps[-1] - steps[0]) / (steps[n - 1] - steps[0])
    spread = (pl.lit(steps[0]) + (pl.col("step") - steps[0]) * stretch).round().cast(pl.Int64)
    return figures.filter(pl.col("step") <= steps[n - 1]).with_columns(step=spread)


def _nonfinite(figures: pl.DataFrame) -> pl.DataFrame:
    """The part of `onsets` that needs no other run."""
    first = figures.filter(pl.col("nan") + pl.col("inf") > 0).group_by("layer", "role", maintain_order=True)
    return first.agg(onset=pl.col("step").min(), excess=pl.lit(1.0)).sort("onset", maintain_order=True)


def _added_up(
    bad: Run, good: Run | None, comparison: Comparison | None, left: pl.DataFrame, loss_left: int | None, twin: int | None
) -> Diagnosis:
    """
    Args:
        left: operands that left the band, as in `onsets`.
        twin: step from which the twin's loss leaves.
    """
    operands = _operands(bad, good, left)
    start = left_at_the_start(bad.loss, loss_left)
    findings = [
        *departure(bad.loss, loss_left, twin),
        *settings(bad.fingerprint, good.fingerprint if good else None, start),
        *filter(None, [compared(bad.loss, good.loss if good else None, bad.unit)]),
        *multiplier(bad, good),
        *operands,
    ]
    latest = None if loss_left is None else loss_left + _interval(bad.figures)
    findings += filter(None, [reach(f, bad.outputs, good.outputs if good else None) for f in operands[:1]])
    blame = blamed(findings, loss_left, latest, _judged(bad, good, latest), good is not None)
    return Diagnosis(bad, good, comparison, findings, blame, loss_left)


def _operands(bad: Run, good: Run | None, left: pl.DataFrame) -> list[Finding]:
    """Why each of the first operands to leave did."""
    firsts = left.unique(["layer", "role"], keep="first", maintain_order=True)
    order = bad.figures.select("layer", "role", onset="step", order="nonfinite_order")
    firsts = firsts.join(order, on=["layer", "role", "onset"], how="left", maintain_order="left")
    firsts = firsts.sort("onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True).head(_LOOKED_INTO)
    found = []
    for layer, role, since in firsts.select("layer", "role", "onset").rows():
        reference = Course.of(good.figures, layer, role) if good else None
        found.append(why(Course.of(bad.figures, layer, role), since, reference))
    lost = bad.loss.steps[~np.isfinite(bad.loss.losses)]
    found = [_behind_the_loss(f, int(lost[0])) if len(lost) else f for f in found]
    return found if _casts(bad.figures) else [f for f in found if f.cause in ("nonfinite", "dead")]


def _behind_the_loss(found: Finding, lost: int) -> Finding:
    """NaN from a step on at which the loss was NaN already is everywhere."""
    if found.cause != "nonfinite" or found.since is None or found.since <= lost:
        return found
    return replace(found, confidence="low", may_follow_the_loss=True)


def _casts(figures: pl.DataFrame) -> bool:
    """Whether anything quantises; else figures are what a recipe would make of the operands, and can have done no harm."""
    return not figures["scale_source"].is_in(["current", "emulated"]).all()


def _interval(figures: pl.DataFrame) -> int:
    """Steps between samples."""
    between = figures["step"].unique().sort().diff().median()
    return int(between) if isinstance(between, (int, float)) else 0


def _judged(bad: Run, good: Run | None, latest: int | None) -> bool:
    """Whether there are samples enough to see an operand leave before the loss does."""
    known = pl.col("relative_error").is_not_null() | (pl.col("nan") + pl.col("inf") > 0)
    steps = bad.figures.filter(known)["step"].unique().sort()
    if good is None:
        return not beginning(bad.figures).is_empty()
    first, last = good.figures["step"].min(), good.figures["step"].max()
    if latest is not None:
        steps = steps.filter(steps <= latest)
    return int(steps.is_between(first, last).sum()) >= IN_A_ROW

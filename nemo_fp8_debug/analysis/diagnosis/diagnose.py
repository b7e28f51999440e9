"""What is wrong with a run: rules that each print their evidence, and what they add up to. "Cannot tell" is an answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from ...core.scale_sources import QUANTIZED, notice
from ...errors import RecordError
from ..comparison.compare import compare, quantized, split_experts
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW, onsets
from ..runs.run import Run
from ..runs.settings import coverage_notes
from .consequences import consequences
from .culprit import Blame, blamed
from .rules.divergence import diverged_at_the_start, divergence, has_enough_losses
from .rules.finding import CAUSES, Finding
from .rules.grad_scale import multiplier
from .rules.operand import Course, why
from .rules.outputs import reach
from .rules.settings import settings
from .rules.spikes import compared

#: operands that are looked into, the first to leave
_LOOKED_INTO = 8
#: part of a run's samples that the rest is compared with where there is no baseline, and how many those must be
_BEGINNING, _FEW = 0.25, 6


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what it adds up to."""

    run: Run
    baseline: Run | None
    #: with a baseline only
    comparison: Comparison | None
    #: all that rules found, those of operands by onset
    findings: Sequence[Finding]
    blame: Blame
    #: step from which the loss stays above the baseline's, or else above its own minimum; None: it does not
    divergence_step: int | None

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
        """`harmful`: the loss has diverged; `harmless so far`: something is out of order and the loss does not diverge;
        `none`; `unknown` without losses."""
        if not has_enough_losses(self.run.loss):
            return "unknown"
        if self.divergence_step is not None:
            return "harmful"
        return "none" if self.cause in ("none", "unknown") else "harmless so far"

    @property
    def notes(self) -> Sequence[str]:
        """What to bear in mind: of the comparison with the baseline, and of operands that the divergence has changed."""
        of_run = [*filter(None, [notice(self.run.quantization)]), *coverage_notes(self.run.fingerprint)]
        later = consequences(self.findings, self.divergence_step, self.run.unit) if self.cause == "software" else []
        return [*(of_run if self.comparison is None else self.comparison.notes), *later]

    @property
    def lead(self) -> int | None:
        """Steps from the culprit's onset to the loss's; None where either is missing."""
        if self.culprit is None or self.culprit.since is None or self.divergence_step is None:
            return None
        return self.divergence_step - self.culprit.since

    @property
    def advice(self) -> Sequence[str]:
        """What to do, a sentence each; nothing about FP8 if that is not the cause."""
        fits = [f for f in self.findings if f.cause == "software"] if self.cause == "software" else self.findings
        return list(dict.fromkeys(finding.advice for finding in fits if finding.advice))

    def verdict(self) -> str:
        """In a sentence or four."""
        told = {
            "harmful": f"The loss diverges at {self.run.unit} {self.divergence_step}.",
            "harmless so far": "The loss does not diverge: what follows has done no harm so far.",
            "none": "The loss does not diverge.",
            "unknown": "There are too few losses to tell whether the run is harmed.",
        }
        sentences = [told[self.harm], self._cause_told()]
        if self.harm in ("none", "harmless so far"):
            sentences.append(
                "If downstream scores are run all the same, look at what inference reads: `nemo-fp8-debug audit` shows the "
                "scales and weights of a checkpoint."
            )
        return " ".join(sentences)

    def _cause_told(self) -> str:
        unit, sure = self.run.unit, f"{self.confidence} confidence"
        if self.culprit is not None:
            lead = "" if self.lead is None else f", {abs(self.lead)} {unit}s {'before' if self.lead >= 0 else 'after'} it"
            where = f"{self.culprit.operand} at {unit} {self.culprit.since}{lead}"
            return f"It begins with {where}: {CAUSES[self.cause]} ({sure}; {self.culprit.evidence})."
        if self.cause == "none":
            return f"The record shows nothing wrong ({sure})."
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
            "divergence_step": self.divergence_step,
            "lead": self.lead,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose(
    run: str | os.PathLike[str] | Run,
    baseline: str | os.PathLike[str] | Run | None = None,
    reference: str | os.PathLike[str] | Run | None = None,
    by: str = "step",
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        run: the record of the run to explain, or a folder above it; a path or any fsspec address.
        baseline: likewise, of a run that went well; None: the run is compared with its own beginning.
        reference: likewise, of a run that differs from `run` in precision alone; None: there is none.
        by: what the runs are matched by: `step`, or `samples` that were consumed, for runs of other batch sizes.

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
    if baseline is None:
        return _alone(_read(run, by), other)
    return _paired(compare(_read(baseline, by), _read(run, by), other, by))


def _read(path: str | os.PathLike[str] | Run, by: str) -> Run:
    """A run without the samples of steps that the optimizer skipped, as long as it stepped later: gradients that overflow
    while a loss scale is sought have changed nothing."""
    run = path if isinstance(path, Run) else Run.read(path, by)
    steps = run.steps.with_columns(skipped=pl.col("skipped").fill_null(0) != 0)
    last = pl.col("step").filter(~pl.col("skipped")).max()
    made_up_for = steps.filter(pl.col("skipped") & (pl.col("step") < last))["step"]
    return replace(run, metrics=run.metrics.filter(~pl.col("step").is_in(made_up_for.implode())))


def _paired(comparison: Comparison) -> Diagnosis:
    run, baseline, reference = comparison.run, comparison.baseline, comparison.reference
    above = has_enough_losses(baseline.loss)
    divergence_step = comparison.divergence_step if above else run.loss.diverged_at
    reference_since = None
    if reference is not None:
        reference_since = reference.loss.above(baseline.loss) if above else reference.loss.diverged_at
    return _added_up(run, baseline, comparison, comparison.out_of_band, divergence_step, reference_since)


def _alone(run: Run, reference: Run | None) -> Diagnosis:
    if run.metrics.is_empty():
        raise RecordError(f"{run.path} has no sampled step, so there is nothing to go by")
    since = [run.loss.diverged_at, None if reference is None else run.loss.above(reference.loss)]
    divergence_step = min((step for step in since if step is not None), default=None)
    usual = beginning(run.metrics)
    out_of_band = _nonfinite(run.metrics) if usual.is_empty() else onsets(usual, quantized(run.metrics))
    return _added_up(
        run,
        None,
        None,
        split_experts(out_of_band)[0],
        divergence_step,
        None if reference is None else reference.loss.diverged_at,
    )


def beginning(metrics: pl.DataFrame) -> pl.DataFrame:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    steps = metrics["step"].unique().sort()
    n = round(len(steps) * _BEGINNING)
    if n < _FEW:
        return metrics.clear()
    stretch = (steps[-1] - steps[0]) / (steps[n - 1] - steps[0])
    spread = (pl.lit(steps[0]) + (pl.col("step") - steps[0]) * stretch).round().cast(pl.Int64)
    return metrics.filter(pl.col("step") <= steps[n - 1]).with_columns(step=spread)


def _nonfinite(metrics: pl.DataFrame) -> pl.DataFrame:
    """The part of `onsets` that needs no other run."""
    first = metrics.filter(pl.col("nan") + pl.col("inf") > 0).group_by("layer", "role", maintain_order=True)
    return first.agg(onset=pl.col("step").min(), excess=pl.lit(1.0)).sort("onset", maintain_order=True)


def _added_up(
    run: Run,
    baseline: Run | None,
    comparison: Comparison | None,
    out_of_band: pl.DataFrame,
    divergence_step: int | None,
    reference: int | None,
) -> Diagnosis:
    """
    Args:
        out_of_band: operands out of the band, as in `onsets`.
        reference: step from which the reference run's loss diverges.
    """
    operands = _operands(run, baseline, out_of_band)
    start = diverged_at_the_start(run.loss, divergence_step)
    findings = [
        *divergence(run.loss, divergence_step, reference),
        *settings(run.fingerprint, baseline.fingerprint if baseline else None, start),
        *filter(None, [compared(run.loss, baseline.loss if baseline else None, run.unit)]),
        *multiplier(run, baseline),
        *operands,
    ]
    latest = None if divergence_step is None else divergence_step + _interval(run.metrics)
    findings += filter(None, [reach(f, run.outputs, baseline.outputs if baseline else None) for f in operands[:1]])
    blame = blamed(findings, divergence_step, latest, _judged(run, baseline, latest), baseline is not None)
    return Diagnosis(run, baseline, comparison, findings, blame, divergence_step)


def _operands(run: Run, baseline: Run | None, out_of_band: pl.DataFrame) -> list[Finding]:
    """Why each of the first operands to leave did."""
    firsts = out_of_band.unique(["layer", "role"], keep="first", maintain_order=True)
    order = run.metrics.select("layer", "role", onset="step", order="nonfinite_order")
    firsts = firsts.join(order, on=["layer", "role", "onset"], how="left", maintain_order="left")
    firsts = firsts.sort("onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True).head(_LOOKED_INTO)
    found = []
    for layer, role, since in firsts.select("layer", "role", "onset").rows():
        reference = Course.of(baseline.metrics, layer, role) if baseline else None
        found.append(why(Course.of(run.metrics, layer, role), since, reference))
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

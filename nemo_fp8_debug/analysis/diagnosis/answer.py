"""The answer of a diagnosis, and its confidence, as data. The narrator describes this data in words.

For each cause, `confidence.json` has the number of verdicts in the benchmark and how many of them are right, both with and
without a baseline. `scripts/validation/fault_injection/fit_confidence.py` writes this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files

import polars as pl

from ...core.keys import SHOWN_AS
from ...core.scale_sources import QUANTIZED, describe_quantization
from ...core.table import load_feature_modules
from ...core.text import format_count
from .. import thresholds
from ..comparison.compare import Comparison
from ..comparison.onset import IN_A_ROW
from ..loss.outcome import LossOutcome
from ..loss.step_change import measure_gap_growth_at_fault
from ..runs.grid import Ints, measure_sampling_interval
from ..runs.run import Run
from ..runs.settings import describe_coverage_gap
from .decide import Decision
from .events import Event, list_events
from .facts import DiagnosedRecords, Facts
from .finding import EXPLAINS, NOT_FP8, Finding
from .limits import compute_early_warning_scores

#: confidence of a cause with fewer than `_FEWEST` verdicts in the benchmark
_UNMEASURED = "medium"
_FEWEST = 20


def measure_confidence(decision: Decision, paired: bool) -> str | None:
    """Return the confidence of a decision: `high`, `medium` or `low`. If nothing was found, return None, because we state no
    confidence for an absence of findings.

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


@dataclass(frozen=True)
class DiagnosisResult:
    """The findings of all rules, and the decision that follows from them."""

    facts: Facts
    records: DiagnosedRecords
    #: all findings, earliest first
    findings: Sequence[Finding]
    #: the outcome of the run's loss, compared with the baseline's loss. Without a baseline, the run's loss is compared with
    #: the reference run's loss or with its own minimum
    loss: LossOutcome
    #: step from which the optimizer skips all steps; None if it does not, or if skipped steps are not recorded
    stopped_at: int | None
    decision: Decision
    #: a sentence that says how the run was checked without a baseline; empty with a baseline
    judged_by: str = ""
    #: findings that run and baseline have in common, if the comparison shows no difference
    shared: Sequence[Finding] = ()
    #: clauses that name the parts of the run that we could not compare with the baseline
    not_compared: Sequence[str] = ()

    @property
    def run(self) -> Run:
        """Return the run."""
        return self.records.run

    @property
    def baseline(self) -> Run | None:
        """Return the baseline, or None."""
        return self.records.baseline

    @property
    def comparison(self) -> Comparison | None:
        """Return the comparison of run and baseline, or None without a baseline."""
        return self.records.comparison

    @property
    def culprit(self) -> Finding | None:
        """Return the finding about the first faulty tensor, or None if no tensor is to blame or the tensor is unknown."""
        return self.decision.culprit

    @property
    def cause(self) -> str:
        """Return the cause, one of `finding.CAUSES`."""
        return self.decision.cause

    @cached_property
    def confidence(self) -> str | None:
        """Return `high` (at least 95% of such verdicts are right), `medium` (at least 80%) or `low`, or None without a
        finding. If an unrecorded learning rate may be the cause, return `medium` at most.
        """
        measured = measure_confidence(self.decision, self.facts.paired)
        return "medium" if measured == "high" and self.may_hide_learning_rate_change else measured

    @property
    def records_learning_rate(self) -> bool:
        """Return True if the run recorded its learning rate."""
        return bool(self.run.steps["lr"].fill_nan(None).count())

    @property
    def may_hide_learning_rate_change(self) -> bool:
        """Return True if the finding could be the consequence of a learning rate that the run did not record."""
        chosen = self.decision.finding
        follows = chosen is not None and chosen.may_follow_the_loss and chosen.kind in EXPLAINS["rate"]
        is_harmed = self.divergence_step is not None or not self.facts.paired
        return follows and is_harmed and not self.records_learning_rate

    @property
    def is_fp8_the_cause(self) -> bool | None:
        """Return True if FP8's representation of operands is the cause, False if it is not, None if the cause is unknown.

        If a reference run is given, FP8 is the cause only if the run's loss ends above the reference run's loss.
        """
        if self.cause in NOT_FP8:
            return False
        if self.cause in ("none", "unknown", "dead", "nonfinite"):
            return None
        return True if self.loss.reference is None else self.loss.differs_from_reference

    @property
    def divergence_step(self) -> int | None:
        """Return the step from which the loss stays too high or the optimizer skips all steps, or None if no harm is known.

        Because of smoothing, this step may be a little too early. If it is shortly before the cause may have begun, return
        the first step at which the cause may have begun.
        """
        loss, chosen = self.loss.harm_onset_step, self.decision.finding
        if loss is not None and chosen is not None and chosen.since is not None and not chosen.slack:
            interval = 1 if chosen.is_exact else int(measure_sampling_interval(self.facts.steps))
            began = chosen.since - interval + 1
            loss = began if loss < began <= loss + self.loss.run.half else loss
        return min((step for step in (loss, self.stopped_at) if step is not None), default=None)

    @property
    def harm(self) -> str:
        """Return the harm to the loss.

        `harmful`: the loss has left the baseline's loss, or the optimizer skips all steps. `likely`: the loss jumped to
        another level. `gap`: the loss is above the baseline's loss, but by less than the limit for harm. `harmless so far`:
        there is a fault, but the loss follows the baseline's loss. Otherwise `none` or `unknown`.
        """
        return state_harm(self.loss, self.stopped_at, self.decision, self.facts.steps)

    @property
    def steps_before_divergence(self) -> int | None:
        """Return the number of steps from the culprit's onset to `divergence_step`, or None if either is unknown."""
        if self.culprit is None or self.culprit.since is None or self.divergence_step is None:
            return None
        return self.divergence_step - self.culprit.since

    @cached_property
    def first_early_warning(self) -> tuple[int, float, str, str] | None:
        """Return the first sample in which an operand exceeded a limit that no healthy operand exceeds, or None.

        The tuple has the step, the multiple of the limit, the layer and the role.
        """
        return next(
            iter(
                compute_early_warning_scores(self.run, self.records.operands_over_limit)
                .filter(pl.col("score") > 1)
                .head(1)
                .rows()
            ),
            None,
        )

    @cached_property
    def culprit_details(self) -> Sequence[str]:
        """Return clauses with further details about the culprit, which optional features of the package provide."""
        found = self.culprit
        if found is None:
            return []
        modules = [module for module in load_feature_modules("rule") if hasattr(module, "describe_culprit")]
        return [told for module in modules for told in module.describe_culprit(found, self.records)]

    @property
    def notes(self) -> Sequence[str]:
        """Return sentences about the limits of the comparison and of sampling."""
        if self.comparison is not None:
            return [*self.comparison.notes, *self._describe_plan(), *self._list_unsampled()]
        known = [*filter(None, [describe_quantization(self.run.quantization)]), *describe_coverage_gap(self.run.fingerprint)]
        bands = [self.judged_by] if self.judged_by and self.run.quantization == QUANTIZED else []
        return [*self.records.notes, *known, *bands, *self._describe_plan(), *self._list_unsampled()]

    def _describe_plan(self) -> list[str]:
        """Return a sentence about the recipes that a plan chose, which are no fault of the run."""
        planned = sorted(self.run.planned)
        if not planned:
            return []
        layer, role = planned[0]
        first = f"{SHOWN_AS.get(role, role)} of {layer}"
        more = f" and {format_count(len(planned) - 1, 'other operand')}" if len(planned) > 1 else ""
        return [f"A plan chose the recipe of {first}{more}. This difference from the run's recipe is intended."]

    def _list_unsampled(self) -> list[str]:
        apart, unit = measure_sampling_interval(self.run.metrics.steps), self.run.unit
        if self.culprit is not None or apart <= 1:
            return []
        return [
            f"Sampled every {apart:g} {unit}s. We miss shorter events. Events under {IN_A_ROW * apart:g} {unit}s are "
            "detected only if they are far out of band."
        ]

    @property
    def events(self) -> Sequence[Event]:
        """Return the events of the run, in order."""
        return list_events(self.findings, self.loss, self.first_early_warning)


#: kinds of causes that are no evidence of harm: recipes are changed on purpose, and the loss itself shows NaN
_NO_EVIDENCE = ("recipe", "nonfinite", "rate", "nothing")


def state_harm(loss: LossOutcome, stopped_at: int | None, decision: Decision, sampled: Ints) -> str:
    """Return the harm that a verdict states; see `DiagnosisResult.harm`.

    If the baseline saw other batches, a gap means likely harm under three conditions: the gap is surely above 0 and exceeds
    the limit, a lasting fault may explain the gap, and the gap did not exist before the fault.

    Args:
        sampled: sampled steps, int64 [S], ascending.
    """
    if stopped_at is not None:
        return "harmful"
    if loss.harm == "unknown" and loss.gap is not None and decision.finding is not None:
        above = loss.gap.percent > loss.max_gap and loss.gap.compute_confidence_interval()[0] > 0
        found = decision.finding
        known = found.kind not in _NO_EVIDENCE and found.strength != "hint" and not found.is_transient
        if above and known and _came_with(loss, found.since, sampled):
            return "likely"
    if loss.harm != "none":
        return loss.harm
    return "none" if decision.cause in ("none", "unknown") else "harmless so far"


def _came_with(loss: LossOutcome, since: int | None, sampled: Ints) -> bool:
    """Return True if the gap to the baseline grew after a step, or if that is unknown."""
    if loss.baseline is None or since is None:
        return True
    return measure_gap_growth_at_fault(loss.run, loss.baseline, since, sampled) > loss.max_gap

"""Diagnose a run, and recommend changes. "Cannot tell" is a valid answer."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...core.keys import Key
from ...errors import RecordError
from ...numerics.limits import MADE_UP
from ..bands.bands import HealthyBands, choose_bands, describe_band_check, judge_by_bands
from ..comparison.compare import Comparison, compare
from ..comparison.onset import IN_A_ROW
from ..loss.outcome import MAX_GAP, LossOutcome
from ..loss.step_change import measure_loss_rise_at_fault
from ..recommendation.options import Budget
from ..recommendation.recommend import Recommendation
from ..runs.grid import measure_sampling_interval
from ..runs.run import Run
from ..runs.settings import choose_reference
from .decide import Decision, DecisionInputs, decide_cause
from .diagnosis import Diagnosis
from .facts import DiagnosedRecords, Facts
from .finding import Finding
from .rule import apply_rules, load_rules
from .rules.losses import find_permanent_skips, skipped_steps
from .rules.operands import judged_samples

Source = str | os.PathLike[str] | Run


def diagnose(
    run: Source,
    baseline: Source | Sequence[Source] | None = None,
    reference: Source | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
    bands: str | os.PathLike[str] | HealthyBands | None = None,
) -> Diagnosis:
    """Find the cause of a run's trouble.

    Args:
        run: path or fsspec address of the record of the run to explain, or of a folder that contains this record.
        baseline: the record of a good run, or of several good runs of the same model with different seeds. If there are
            several, we compare the loss with their mean, and the rest with the first baseline. None: use `bands` or fixed
            limits instead.
        reference: the record of a run that differs from `run` only in precision.
        by: how to match the runs: by `step`, or by consumed `samples` if their batch sizes differ.
        bands: bands of healthy runs, used without a baseline, or a file of bands from `nemo-fp8-debug learn`. None: the
            bands in the package.
        max_gap: largest gap that does not count as harm, in percent of the baseline's mean loss over the last part of the
            run.

    Returns:
        The diagnosis, with `harm`, `cause`, `confidence`, `culprit`, each rule's `findings`, and `verdict()` in sentences.

    Raises:
        RecordError: a record is missing or unreadable, or has no sampled step.
        ConfigError: `by` is invalid, or baselines are of different models.

    Example:
        >>> found = diagnose("runs/bad", "runs/baseline", "runs/reference")
        >>> found.harm, found.cause, found.divergence_step
        ('harmful', 'learning_rate', 61)
    """
    baselines = list_baselines(baseline)
    if baselines:
        return diagnose_comparison(compare_for_diagnosis(run, baselines, reference, by, max_gap))
    facts, records = measure_facts(run, baselines, reference, by, max_gap, bands)
    return replace(_diagnose_facts(facts, records), judged_by=describe_band_check(records.bands))


def measure_facts(
    run: Source,
    baselines: Sequence[Source] = (),
    reference: Source | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
    bands: str | os.PathLike[str] | HealthyBands | None = None,
) -> tuple[Facts, DiagnosedRecords]:
    """Return the facts for a diagnosis, and the records from which they are measured.

    The arguments are as in `diagnose`.
    """
    if baselines:
        return _measure_compared(compare_for_diagnosis(run, baselines, reference, by, max_gap))
    mine = _read(run, by)
    other, left_out = choose_reference(mine, _read_reference(reference, by))
    if mine.metrics.is_empty():
        raise RecordError(f"{mine.path} has no sampled step: a diagnosis needs at least one")
    chosen = choose_bands(mine, bands)
    records = DiagnosedRecords(mine, bands=None if chosen is None else judge_by_bands(mine, chosen), notes=left_out)
    return Facts.from_records(records, _judge_loss_alone(mine, other, max_gap)), records


def _measure_compared(comparison: Comparison) -> tuple[Facts, DiagnosedRecords]:
    records = DiagnosedRecords(comparison.run, comparison.baseline, comparison)
    facts = Facts.from_records(records, comparison.loss)
    if facts.past_baseline is not None:
        own = facts.past_baseline.loss
        if facts.loss.harm_onset_step is None and (own.harm_onset_step or 0) > facts.baseline_end:
            facts = Facts.from_records(records, own)
    return facts, records


def list_baselines(baseline: Source | Sequence[Source] | None) -> list[Source]:
    """Return the baselines as a list, which may be empty."""
    return [baseline] if isinstance(baseline, str | os.PathLike | Run) else list(baseline or ())


def compare_for_diagnosis(
    run: Source,
    baseline: Source | Sequence[Source],
    reference: Source | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
) -> Comparison:
    """Return the comparison for a diagnosis, without samples of steps that the optimizer skipped.

    The arguments are as in `diagnose`.
    """
    first, *others = list_baselines(baseline)
    return compare(_read(run, by), _read(first, by), _read_reference(reference, by), by, max_gap=max_gap, others=others)


def _read_reference(path: Source | None, by: str) -> Run | None:
    return path if path is None or isinstance(path, Run) else Run.read(path, by)


def _read(path: Source, by: str) -> Run:
    return (path if isinstance(path, Run) else Run.read(path, by)).drop_skipped_steps()


def diagnose_comparison(comparison: Comparison) -> Diagnosis:
    """Diagnose a run from its comparison with a baseline; see `diagnose`."""
    facts, records = _measure_compared(comparison)
    found = _diagnose_facts(facts, records)
    shared = () if found.decision.finding is not None else _find_shared(found, records)
    if shared and found.cause in ("software", "none"):
        found = replace(found, decision=Decision(None, "unknown", likeliest=found.decision.likeliest))
    return replace(found, shared=shared)


def _judge_loss_alone(run: Run, reference: Run | None, max_gap: float) -> LossOutcome:
    """Evaluate the loss of a run without a baseline, both alone and against the reference run. If only one of both results
    shows harm, return this result. Otherwise, return the comparison with the reference run.
    """
    own = LossOutcome(run.loss, None, max_gap)
    if reference is None:
        return own
    loss = LossOutcome.judge_loss(run.loss, reference.loss, max_gap)
    chosen = own if loss.harm_onset_step is None and own.harm_onset_step is not None else loss
    return replace(chosen, reference=reference.loss)


class Judgment(NamedTuple):
    """The findings and the decision that follow from facts."""

    findings: Sequence[Finding]
    loss: LossOutcome
    #: step from which the optimizer skips all steps, or None
    stopped_at: int | None
    decision: Decision


def judge_facts(facts: Facts, leave_out: Collection[str] = ()) -> Judgment:
    """Apply the rules to the facts of a run, and decide the cause. This does not need the run's record.

    Args:
        leave_out: names of rules to skip, for an ablation.
    """
    findings = sorted(apply_rules(facts, leave_out), key=lambda f: (-1 if f.since is None else f.since, -f.strength_rank))
    loss, stopped_at = _add_rise(facts, findings), find_permanent_skips(skipped_steps(facts).run)
    harmed_since = min((step for step in (loss.harm_onset_step, stopped_at) if step is not None), default=None)
    interval = int(measure_sampling_interval(facts.steps))
    out = any(f.is_out_of_band and f.strength != "hint" for f in findings)
    # If noise may explain a gap to the baseline, we do not state that the loss is healthy.
    in_doubt = harmed_since is None and facts.paired and loss.harm == "unknown"
    in_doubt = in_doubt and (loss.gap is None or loss.gap.percent > loss.max_gap)
    judged = _is_judged(facts, harmed_since, interval, out) and not in_doubt
    settled = int(facts.steps[min(MADE_UP, len(facts.steps) - 1)]) if len(facts.steps) else 0
    by_precision = loss.differs_from_reference is not False
    evidence = DecisionInputs(
        harmed_since, interval, settled, facts.paired, judged, loss.diverges, by_precision, max(2, len(loss.run.steps) // 30)
    )
    decision = decide_cause(findings, evidence)
    return Judgment(findings, loss, stopped_at, decision)


def _diagnose_facts(facts: Facts, records: DiagnosedRecords) -> Diagnosis:
    missed = _list_not_compared(records.run, records.baseline)
    return Diagnosis(facts, records, *judge_facts(facts), not_compared=missed)


def _add_rise(facts: Facts, findings: Sequence[Finding]) -> LossOutcome:
    """Return the outcome of the loss. If losses alone show no harm, add the rise of the loss at the step of a finding."""
    loss = facts.loss
    if loss.harm not in ("unknown", "likely") or (
        loss.gap is not None and (loss.gap.paired or loss.gap.percent <= loss.max_gap)
    ):
        return loss  # a rise that does not last to the end does not count as harm
    if loss.gap is not None and loss.gap.compute_confidence_interval()[0] <= 0:
        return loss  # noise may explain the gap
    steps = sorted({f.since for f in findings if f.since is not None and f.strength != "hint"})
    rises = [
        (step, measure_loss_rise_at_fault(loss.run, loss.baseline, step, facts.steps, lasting=loss.max_gap))
        for step in steps
    ]
    harmful = [(step, rise) for step, rise in rises if rise is not None and rise > loss.max_gap]
    return replace(loss, rise=harmful[0]) if harmful else loss


def _is_judged(facts: Facts, harmed_since: int | None, interval: int, out: bool) -> bool:
    """Return True if there are enough samples to see an operand leave its band before the loss rises.

    Args:
        out: whether any operand leaves its band at any time. If no operand does, all samples count.
    """
    samples = judged_samples(facts)
    if facts.baseline_end >= 0 and harmed_since is not None and harmed_since > facts.baseline_end:
        return False
    if harmed_since is None or (facts.paired and not out):
        return len(samples) >= IN_A_ROW
    return not facts.paired or int((samples <= harmed_since + interval).sum()) >= IN_A_ROW


def _find_shared(found: Diagnosis, records: DiagnosedRecords) -> Sequence[Finding]:
    """Return the findings that run and baseline have in common, because a comparison cannot show these."""
    run, baseline = records.run, records.baseline
    assert baseline is not None
    mine = _find_alone(run, found.loss.max_gap)
    theirs = {(f.rule, f.cause, f.layer, f.role) for f in _find_alone(baseline, found.loss.max_gap)} if mine else set()
    known = {(f.rule, f.layer, f.role) for f in found.findings if f.tensor_name}
    shared = [f for f in mine if (f.rule, f.cause, f.layer, f.role) in theirs and (f.rule, f.layer, f.role) not in known]
    since = [LossOutcome(each.loss, None, found.loss.max_gap).harm_onset_step for each in (run, baseline)]
    if None not in since:
        evidence = f"both losses rise for good, the run's from {run.unit} {since[0]} on, the baseline's from {since[1]} on"
        shared.append(Finding("loss", "unknown", "clear", evidence, since=since[0]))
    return shared


def _find_alone(run: Run, max_gap: float) -> list[Finding]:
    """Return the findings of the rules that need no baseline, without hints."""
    facts = Facts.from_records(DiagnosedRecords(run), LossOutcome(run.loss, None, max_gap))
    others = [rule.name for rule in load_rules() if not rule.needs_no_baseline]
    return [f for f in apply_rules(facts, leave_out=others) if f.strength != "hint" and f.cause != "unknown"]


def _list_not_compared(run: Run, baseline: Run | None) -> list[str]:
    """Return clauses that name the parts of a run that we could not compare with the baseline."""
    if baseline is None:
        return []
    missed = []
    steps, losses, ends = run.metrics.steps, run.loss.steps, baseline.metrics.steps
    if len(ends) and len(steps) and steps[-1] > ends[-1]:
        missed.append(f"what happened after {run.unit} {ends[-1]}, where the baseline ends")
    if len(losses) and len(steps):
        unsampled = losses[-1] - steps[-1]
        if unsampled > measure_sampling_interval(steps):
            missed.append(f"what happened after {run.unit} {steps[-1]}, the last sample")
    mine, theirs = set(run.metrics.tensors.rows()), set(baseline.metrics.tensors.rows())
    if mine - theirs:
        missed.append(f"{len(mine - theirs)} of {len(mine)} tensors, which the baseline does not have")
    return missed


def recommend(
    run: Source,
    baseline: Source | Sequence[Source] | None = None,
    operands: Sequence[Key] | None = None,
    budget: Budget | None = None,
    reference: Source | None = None,
) -> Recommendation:
    """Return the cheapest change for each operand that loses too much precision.

    Args:
        run: path or fsspec address of the record of the run to fix, or of a folder that contains this record.
        baseline: the record of a good run, or of several, as in `diagnose`. With a baseline, we change only operands that
            left its band before the loss diverged. Without a baseline, we change all operands that exceed the budget. If
            something other than FP8 is to blame, we change no operand.
        operands: operands to fix instead, a list of (layer, role). A role is `input`, `weight` or `grad_output`.
        budget: the largest errors allowed for an operand; None: `Budget()`.
        reference: the record of the same run in higher precision, as in `diagnose`. If the reference fails too, FP8 is not
            to blame.

    Returns:
        The recommendation. Pass its `.plan` to `apply_plan` or `FP8PlanCallback`. `.findings` has each operand's errors
        before and after, and `.to_json()` returns everything as plain values.

    Raises:
        RecordError: a record is missing or unreadable, has no sampled step, or has no such operand.

    Example:
        >>> found = recommend("runs/bad", operands=[("layers.0.fc2", "input")])
        >>> [(change.layer, change.recipe) for change in found.plan.changes]
        [('layers.0.fc2', 'current-e5m2')]
    """
    return diagnose(run, baseline, reference).recommend(budget, operands)

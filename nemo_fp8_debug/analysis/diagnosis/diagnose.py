"""What is wrong with a run: rules that each print their evidence, and what they add up to. "Cannot tell" is an answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import polars as pl

from ...core.features import load_modules
from ...core.scale_sources import HIGH_PRECISION, QUANTIZED
from ...errors import RecordError
from ..bands.bands import Bands, bands_for
from ..bands.judge import Judged, judge, told
from ..comparison.compare import compare, quantized
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW
from ..loss.outcome import MAX_GAP, LossOutcome
from ..loss.step_change import rises_with
from ..runs.grid import Ints, interval_of
from ..runs.metrics import IS_NONFINITE
from ..runs.run import Run
from .culprit import Blame, Evidence, blamed
from .diagnosis import Diagnosis
from .operands import against_baseline, alone, beginning, shared_with, with_zeros
from .rules.activations import activations
from .rules.beyond import with_limits
from .rules.channels import channels
from .rules.divergence import diverged_at_the_start, divergence
from .rules.finding import Finding
from .rules.grad_scale import multiplier
from .rules.gradient_norm import gradient_norm
from .rules.inputs import inputs
from .rules.learning_rate import learning_rate
from .rules.level import level
from .rules.nonfinite import nonfinite
from .rules.optimizer_steps import optimizer_steps, stopped_at
from .rules.outputs import error_budget, reach
from .rules.recipe import recipes
from .rules.replicas import replicas
from .rules.settings import settings
from .rules.spikes import compared
from .rules.steps_of_weights import steps_of_weights
from .rules.still_weights import still_weights
from .rules.weights import weights
from .rules.wrong_product import wrong_product, wrong_reduction
from .rules.zeros import find_zeros

Source = str | os.PathLike[str] | Run
#: part of a run's steps, and of its tensors, that may go unseen while the rest still shows that nothing is wrong
_UNSAMPLED = 0.1


def diagnose(
    run: Source,
    baseline: Source | Sequence[Source] | None = None,
    reference: Source | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
    bands: str | os.PathLike[str] | Bands | None = None,
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        run: the record of the run to explain, or a folder above it; a path or any fsspec address.
        baseline: likewise, of a run that went well; or of several of one model that differ in their seed: the loss is
            compared with the mean of all, and all else with the first. None: the run is judged by `bands` or fixed limits.
        reference: likewise, of a run that differs from `run` in precision alone; None: there is none.
        by: what the runs are matched by: `step`, or `samples` that were consumed, for runs of other batch sizes.
        bands: of healthy runs, which a run without a baseline is judged by: a file of `nemo-fp8-debug learn`; None: those
            that come with the package.
        max_gap: percent that the mean loss over the last part may lie above the baseline's before it counts as harm.

    Returns:
        What was found: `harm`, `cause`, `confidence`, `culprit`, each rule's `findings`, and `verdict()` in sentences.

    Raises:
        RecordError: a record is missing or unreadable, or has nothing to go by.
        ConfigError: `by` is neither, or baselines are of different models.

    Example:
        >>> found = diagnose("runs/bad", "runs/baseline", "runs/reference")
        >>> found.harm, found.cause, found.divergence_step
        ('harmful', 'learning_rate', 61)
    """
    baselines = several(baseline)
    if baselines:
        return diagnose_comparison(comparison_of(run, baselines, reference, by, max_gap))
    mine = _read(run, by)
    return _alone(mine, _reference(reference, by), max_gap, bands)


def several(baseline: Source | Sequence[Source] | None) -> list[Source]:
    """None, one or several baselines as a list."""
    return [baseline] if isinstance(baseline, str | os.PathLike | Run) else list(baseline or ())


def comparison_of(
    run: Source,
    baseline: Source | Sequence[Source],
    reference: Source | None = None,
    by: str = "step",
    max_gap: float = MAX_GAP,
) -> Comparison:
    """The comparison that a diagnosis rests on: without samples of steps that the optimizer skipped. Arguments are those of
    `diagnose`."""
    first, *others = several(baseline)
    return compare(_read(first, by), _read(run, by), _reference(reference, by), by, max_gap=max_gap, others=others)


def _reference(path: Source | None, by: str) -> Run | None:
    return path if path is None or isinstance(path, Run) else Run.read(path, by)


def _read(path: Source, by: str) -> Run:
    return (path if isinstance(path, Run) else Run.read(path, by)).without_skipped()


def diagnose_comparison(comparison: Comparison) -> Diagnosis:
    """Return what is wrong with a run that has been compared; see `diagnose`."""
    run, baseline, loss = comparison.run, comparison.baseline, comparison.loss
    operands = against_baseline(comparison)
    if (end := _baseline_end(run, baseline)) is not None:
        own = replace(loss, baseline=None, seeds=None)
        loss = own if loss.harmful_since is None and (own.harmful_since or 0) > end else loss
        known = {f.operand for f in operands}
        sure = [f for f in alone(run, _judged_by_bands(run, None)) if f.confidence != "low"]
        operands += [f for f in sure if (f.since or 0) > end and f.operand not in known]
    found = _added_up(run, baseline, comparison, operands, loss)
    unexplained = found.cause in ("none", "unknown", "software") and found.blame.finding is None
    shared = _shared(found, run, baseline) if unexplained else []
    blame = found.blame
    if shared and found.cause == "none":
        blame = replace(blame, confidence=None)
    elif shared and found.cause == "software" and not any(f.rule == "reference" for f in found.findings):
        blame = Blame(None, "unknown", "low")
    return replace(found, blame=blame, shared=shared)


def _shared(found: Diagnosis, run: Run, baseline: Run) -> list[Finding]:
    """Return what is wrong with a run by itself and with its baseline too, so that comparing them cannot show it."""
    shared: list[Finding] = []
    # The baseline is read only if the run shows something, which few do.
    if (mine := nonfinite(run, None)) and nonfinite(baseline, None):
        shared += mine
    if (mine := _without_gradients(run)) and _without_gradients(baseline):
        shared += mine
    shared += shared_with(run, baseline)
    since = [LossOutcome(each.loss, None, found.loss.max_gap).harmful_since for each in (run, baseline)]
    if None not in since:
        facts = f"both losses rise for good, the run's from {run.unit} {since[0]} on, the baseline's from {since[1]} on"
        shared.append(Finding("divergence", "unknown", "medium", facts, since=since[0]))
    known = {(f.rule, f.operand) for f in found.findings if f.operand}
    return [f for f in shared if (f.rule, f.operand) not in known]


def _without_gradients(run: Run) -> list[Finding]:
    """Return that all dY of a run are zero, if they are."""
    return [f for f in find_zeros(run, None) if not f.may_follow_the_loss]


def _not_compared(run: Run, baseline: Run | None) -> list[str]:
    """Return what of a run no baseline shows, in clauses."""
    if baseline is None:
        return []
    missed = []
    if (end := _baseline_end(run, baseline)) is not None:
        missed.append(f"what happened after {run.unit} {end}, where the baseline ends")
    steps, losses = run.metrics.steps, run.loss.steps
    if (
        len(losses)
        and len(steps)
        and losses[-1] - steps[-1] > max(interval_of(steps), _UNSAMPLED * (losses[-1] - losses[0]))
    ):
        missed.append(f"what happened after {run.unit} {steps[-1]}, the last sample")
    mine, theirs = set(run.metrics.tensors.rows()), set(baseline.metrics.tensors.rows())
    if len(mine - theirs) > _UNSAMPLED * len(mine):
        missed.append(f"{len(mine - theirs)} of {len(mine)} tensors, which the baseline does not have")
    return missed


def _alone(run: Run, reference: Run | None, max_gap: float, bands: str | os.PathLike[str] | Bands | None) -> Diagnosis:
    if run.metrics.is_empty():
        raise RecordError(f"{run.path} has no sampled step, so there is nothing to go by")
    loss = LossOutcome.of(run.loss, None if reference is None else reference.loss, max_gap)
    if loss.harmful_since is None:
        own = LossOutcome(run.loss, None, max_gap)
        loss = own if own.harmful_since is not None else loss
    if reference is not None:
        loss = replace(loss, reference=reference.loss)
    judged = _judged_by_bands(run, bands)
    covered = judged is not None and judged.all_covered
    found = _added_up(run, None, None, alone(run, judged), loss, covered)
    return replace(found, judged_by=told(judged))


def _judged_by_bands(run: Run, bands: str | os.PathLike[str] | Bands | None) -> Judged | None:
    chosen = bands_for(run, bands)
    return None if chosen is None else judge(run, chosen)


def _baseline_end(run: Run, baseline: Run | None) -> int | None:
    """Return the baseline's last sampled step if the run has later samples, else None."""
    if baseline is None or baseline.metrics.is_empty() or run.metrics.is_empty():
        return None
    end = int(baseline.metrics.steps[-1])
    return end if run.metrics.steps[-1] > end else None


Rule = Callable[[Run, Run | None], Iterable[Finding]]


def _evaluate(rules: Iterable[Rule], run: Run, baseline: Run | None) -> Iterator[Finding]:
    """Yield what rules find next to the baseline, and after its end what they find without one."""
    end = _baseline_end(run, baseline)
    for rule in rules:
        found = list(rule(run, baseline))
        yield from found
        if end is not None:
            known = {(f.rule, f.operand) for f in found}
            later = [f for f in rule(run, None) if f.since is not None and f.since > end]
            yield from (f for f in later if (f.rule, f.operand) not in known)


def _added_up(
    run: Run,
    baseline: Run | None,
    comparison: Comparison | None,
    operands: Sequence[Finding],
    loss: LossOutcome,
    covered: bool = False,
) -> Diagnosis:
    """
    Args:
        operands: what is said of them.
        covered: whether bands of healthy runs stand for a baseline.
    """
    operands = with_zeros(operands, find_zeros(run, baseline))
    around = list(_evaluate((recipes, learning_rate, nonfinite, partial(inputs, loss=loss)), run, baseline))
    loss = _with_rise(loss, [*operands, *around], run.metrics.steps)
    stopped = stopped_at(run)
    harmed_since = min((step for step in (loss.harmful_since, stopped) if step is not None), default=None)
    start = diverged_at_the_start(run.loss, harmed_since)
    findings = [
        *divergence(loss, run.unit, run.quantization != HIGH_PRECISION),
        *around,
        *_evaluate((optimizer_steps,), run, baseline),
        *wrong_product(run),
        *wrong_reduction(run),
        *replicas(run),
        *filter(None, [level(run.loss, run.unit) if baseline is None else None]),
        *_evaluate((gradient_norm, weights, still_weights, steps_of_weights, activations), run, baseline),
        *settings(run.fingerprint, baseline.fingerprint if baseline else None, start),
        *filter(None, [compared(run.loss, baseline.loss if baseline else None, run.unit)]),
        *_evaluate((multiplier, *(module.find for module in load_modules("rule"))), run, baseline),
        *operands,
    ]
    findings += filter(
        None, [reach(f, run.table("outputs"), baseline.table("outputs") if baseline else None) for f in operands[:1]]
    )
    findings += filter(None, [channels(run, baseline, next(iter(operands), None), harmed_since)])
    findings += filter(
        None, [error_budget(f, run.table("outputs"), run.table("verification"), run.table("states")) for f in operands[:1]]
    )
    sampled = None if harmed_since is None else harmed_since + int(interval_of(run.metrics.steps))
    latest = None if sampled is None else sampled + _slack(run)
    judged = _judged(run, baseline, sampled) and (baseline is not None or covered or _has_limits(run))
    end, not_compared = _baseline_end(run, baseline), _not_compared(run, baseline)
    if end is not None and harmed_since is not None and harmed_since > end:
        judged = False  # no band shows whether an operand left before the loss did
    unharmed = loss.harm == "none" and harmed_since is None and not not_compared
    by_precision = loss.differs_from_reference is not False
    evidence = Evidence(findings, harmed_since, latest, judged, baseline is not None, unharmed, by_precision)
    blame = blamed(evidence)
    # Where an operand goes wrong, X behind it moves as well: that is no finding of its own.
    told = [f for f in findings if f.rule != "inputs" or f is blame.finding or not operands]
    return Diagnosis(run, baseline, comparison, told, blame, loss, stopped, not_compared=not_compared)


def _with_rise(loss: LossOutcome, findings: Sequence[Finding], sampled: Ints) -> LossOutcome:
    """With a rise at a step at which something else went wrong, if the losses alone do not tell that there is harm."""
    if loss.harm not in ("unknown", "likely") or (
        loss.gap is not None and (loss.gap.paired or loss.gap.percent <= loss.max_gap)
    ):
        return loss  # a rise that is gone by the end is no harm
    steps = sorted({f.since for f in findings if f.since is not None and f.confidence != "low"})
    rises = [(step, rises_with(loss.run, loss.baseline, step, sampled, lasting=loss.max_gap)) for step in steps]
    harmful = [(step, rise) for step, rise in rises if rise is not None and rise > loss.max_gap]
    return replace(loss, rise=harmful[0]) if harmful else loss


def _slack(run: Run) -> int:
    """Steps by which the noise of the loss may have its divergence found too early."""
    return max(2, len(run.loss.steps) // 30)


def _has_limits(run: Run) -> bool:
    """Whether there is anything to judge a run by that has neither baseline nor bands."""
    return run.quantization != QUANTIZED or not with_limits(quantized(run.metrics)).is_empty()


def _judged(run: Run, baseline: Run | None, latest: int | None) -> bool:
    """Whether there are samples enough to see an operand leave before the loss does."""
    if baseline is None:
        return not beginning(run.metrics).is_empty()
    known = pl.col("relative_error").is_not_null() | IS_NONFINITE
    columns = ["relative_error", "nan", "inf"]
    steps = run.metrics.gathered(columns, lambda rows: rows.filter(known).unique("step"))["step"].to_list()
    first, last = baseline.metrics.steps[0], baseline.metrics.steps[-1]
    within = [step for step in steps if first <= step <= last and (latest is None or step <= latest)]
    return len(within) >= IN_A_ROW

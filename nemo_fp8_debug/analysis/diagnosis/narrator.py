"""The narrator, which describes a diagnosis in words for the terminal, the tab, reports, Markdown and JSON.

Only this module writes sentences of a verdict. Their order is: the fault, the next step, the loss, the limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.keys import GRADIENTS, SHOWN_AS
from ...core.text import format_number, format_power_of_two
from ...numerics.metric_names import LABELS
from ...record.schema import TABLES
from ..comparison.onset import IN_A_ROW
from ..loss.gap import CHECK_DATA, Gap
from ..loss.outcome import OF_RANGE, LossOutcome
from ..loss.seeds import SeedSpread
from ..runs.grid import measure_sampling_interval
from .answer import DiagnosisResult
from .finding import CAUSES, NOT_FP8_ADVICE, Finding

if TYPE_CHECKING:  # recommendation imports torch
    from ..recommendation.recommend import TensorFix

#: if a tensor loses at least this share of its precision or values, we say that its format represents it badly
_BADLY = 0.1


def tell_sentence(text: str) -> str:
    """Turn a clause into a sentence. If the clause begins with the name of a tensor, the first letter stays unchanged.

    Example:
        >>> tell_sentence("values are lost"), tell_sentence("dY of fc1 is out of band")
        ('Values are lost.', 'dY of fc1 is out of band.')
    """
    first = text[:1] if text[1:2].isupper() else text[:1].upper()
    return f"{first}{text[1:].rstrip('.')}." if text else ""


def name_tensor(layer: str, role: str) -> str:
    """Return the usual name of a tensor.

    Example:
        >>> name_tensor("layers.0.fc1", "grad_output")
        'dY of layers.0.fc1'
    """
    return f"{SHOWN_AS[role]} of {layer}"


def format_metric_value(metric: str, value: float | None) -> str:
    """Return a value of a metric in its unit, or as a factor if the unit is bits.

    Example:
        >>> values = {"outlier_log2": 3.0, "underflow_pct": 12.34, "amax": None}
        >>> [format_metric_value(metric, value) for metric, value in values.items()]
        ['x8', '12.3%', '-']
    """
    if value is None:
        return "-"
    if metric.endswith("_log2"):
        return format_power_of_two(value)
    return format_number(value, "%" if metric.endswith("_pct") else "")


def describe_band_exit(row: Mapping[str, Any], zero_since: int | None = None) -> str:
    """Return a clause with the metric by which a tensor is out of band, and the metric's expected and actual value.

    Args:
        row: row of a tensor with metric, expected, onset (or since), and value (or found).
        zero_since: first step from which all values of the tensor are zero, or None.
    """
    onset = row.get("onset", row.get("since"))
    if zero_since is not None and onset is not None and onset >= zero_since:
        return "all its values are zero"
    if row["metric"] is None:
        return "out of band"
    if row["metric"] == "nonfinite":
        return LABELS["nonfinite"][0]
    values = row["expected"], row.get("value", row.get("found"))
    before, after = (format_metric_value(row["metric"], value) for value in values)
    return f"{LABELS[row['metric']][0]} {before} -> {after}"


def describe_step_distance(step: int, other: int, unit: str) -> str:
    """Describe the distance of a step from another step in words.

    Example:
        >>> [describe_step_distance(step, 49, "step") for step in (48, 60, 49)]
        ['1 step before', '11 steps after', 'with']
    """
    by = step - other
    return "with" if by == 0 else f"{abs(by)} {unit}{'' if abs(by) == 1 else 's'} {'before' if by < 0 else 'after'}"


def tell_percent(value: float, of_range: bool = False, signed: bool = False) -> str:
    """Format a percentage with three digits.

    Example:
        >>> tell_percent(56.04), tell_percent(-0.183, signed=True)
        ('56%', '−0.183%')
    """
    return format_number(value, f"%{OF_RANGE if of_range else ''}", signed=signed)


# The verdict ------------------------------------------------------------------------------------------------------------


def tell_headline(found: DiagnosisResult) -> str:
    """Return the fault, with the tensor's name, and its effect on the loss, in at most 25 words."""
    return " ".join(filter(None, [_tell_trouble(found), tell_sentence(_tell_loss_shortly(found))]))


def tell_verdict(found: DiagnosisResult, advice: Sequence[str]) -> str:
    """Return the verdict: the fault, the next step, the loss, and the limits of the diagnosis.

    Args:
        advice: the result of `tell_advice`.
    """
    return " ".join(
        [*_tell_finding(found), *tell_next_step(found, advice), *_tell_outcome(found), *tell_possible_misses(found)[:2]]
    )


def tell_conclusion(found: DiagnosisResult) -> str:
    """Return the verdict without the next step and without the limits of the diagnosis."""
    return " ".join([*_tell_finding(found), *_tell_outcome(found)])


def _tell_finding(found: DiagnosisResult) -> list[str]:
    """Return sentences with the fault, its evidence, and unusual findings."""
    trouble = (_tell_trouble(found, found.confidence), _tell_evidence(found), _tell_unusual(found))
    return [*filter(None, trouble)]


def _tell_outcome(found: DiagnosisResult) -> list[str]:
    """Return sentences about the outcome of the losses."""
    sentences = [tell_loss_outcome(found.loss, found.run.unit, found.divergence_step)]
    if found.harm == "likely" and found.loss.harm == "unknown":
        sentences.append("With this fault, harm is likely.")
    if found.stopped_at is not None:
        sentences.append(f"The optimizer takes no step from {found.run.unit} {found.stopped_at} on.")
    sentences.append(tell_reference_loss(found.loss, found.run.unit))
    if found.shared:
        shared = "; ".join(_name_finding(each, found.run.unit) for each in found.shared[:2])
        sentences.append(f"The baseline has the same trouble: {shared}.")
    return [*filter(None, sentences)]


def _tell_trouble(found: DiagnosisResult, confidence: str | None = None) -> str:
    """Return the faulty tensor or the cause, and the step of its onset.

    Args:
        confidence: the confidence to state, or None to state no confidence.
    """
    chosen, sure = found.decision.finding, f" ({confidence} confidence)" if confidence else ""
    if chosen is None:
        return _tell_no_cause(found, sure)
    means, since = CAUSES[chosen.cause].means, _tell_since(found, chosen)
    if _is_told_by_evidence(chosen):
        return tell_sentence(f"{chosen.evidence.partition('; ')[0]}{sure}")
    if chosen.tensor_name is None or "{tensor}" in means:
        layer = f"layer {chosen.layer}" if (chosen.layer or "").isdigit() else chosen.layer
        where = f"in {layer}, " if layer and chosen.tensor_name is None else ""
        return tell_sentence(f"{where}{means.format(tensor=chosen.tensor_names)} {since}{sure}")
    return f"{chosen.tensor_name} went wrong {since}{sure}: {means}."


def _is_told_by_evidence(chosen: Finding) -> bool:
    """Return True if the first clause of the evidence names the fault better than the cause's own words."""
    return chosen.cause == "software" or (chosen.cause in ("nonfinite", "dead") and chosen.tensor_name is None)


def _tell_no_cause(found: DiagnosisResult, sure: str) -> str:
    if found.cause == "software":
        return f"Something other than FP8's representation of the operands is wrong{sure}."
    if found.loss.is_far_below:
        return "The loss is too low to trust."
    harmed = found.harm in ("harmful", "likely")
    if found.decision.likeliest and (harmed or found.cause == "unknown"):
        told = " or ".join(_name_finding(each, found.run.unit) for each in found.decision.likeliest)
        return f"{'We cannot tell why. Likeliest' if harmed else f'{_tell_doubt(found)}. Likeliest, if anything'}: {told}."
    if found.cause == "unknown":
        return "We cannot tell what is wrong." if harmed else f"{_tell_doubt(found)}."
    clear = any(each.strength != "hint" for each in list_unusual(found))
    if clear:
        return "We found nothing that harms the loss."
    return "We found nothing certain." if found.decision.likeliest else "We found nothing wrong."


def _tell_doubt(found: DiagnosisResult) -> str:
    """Return a clause with the reason why we do not state that a run without a finding is healthy."""
    if found.shared:
        return "We cannot tell whether anything is wrong"
    if found.loss.exceeds_max_gap:
        return "The loss lies above the baseline's, and we found no cause"
    if found.facts.paired and found.loss.harm == "unknown":
        return "We found nothing wrong"
    n = len(found.run.metrics.steps)
    if n >= 2 * IN_A_ROW and not found.facts.paired:
        return "We found nothing, but we can judge these operands only by a baseline"
    return f"We found nothing, but {n} sample{' is' if n == 1 else 's are'} too few to be sure"


def _name_finding(found: Finding, unit: str) -> str:
    where, means = found.tensor_name or found.layer, CAUSES[found.cause].means
    if found.cause in ("unknown", "software", "changed_recipe") or (where is None and means.startswith("its ")):
        means = found.evidence
    is_told = found.since is None or (where is None and str(found.since) in means)
    since = "" if is_told else f" since {unit} {found.since}"
    return f"{where}{since} ({means})" if where else f"{means}{since}"


def list_unusual(found: DiagnosisResult) -> list[Finding]:
    """Return findings that the verdict does not blame: harmless faults, and hints that also occur in healthy runs."""
    if found.cause != "none" or found.harm in ("harmful", "likely"):
        return []
    sure = [each for each in found.findings if each.strength != "hint" and each.cause != "none"]
    return [*sure, *(each for each in found.decision.likeliest if each not in sure)]


def _tell_unusual(found: DiagnosisResult) -> str:
    unusual = list_unusual(found)[:2]
    unit = found.run.unit
    since = [f" since {unit} {each.since}" if each.tensor_name and each.since is not None else "" for each in unusual]
    told = [
        f"{each.tensor_name or each.layer or each.rule}{at} ({each.evidence})"
        for each, at in zip(unusual, since, strict=True)
    ]
    return f"Unusual: {'; '.join(told)}." if told else ""


def _tell_since(found: DiagnosisResult, chosen: Finding) -> str:
    unit = found.run.unit
    if chosen.since is None:
        return f"at an unknown {unit}"
    if chosen.or_earlier:
        return f"since {unit} {chosen.since} or earlier"
    if chosen.since == found.run.metrics.steps[0]:
        return "from the first sample on"
    if chosen.slack:
        return f"around {unit} {chosen.since}"
    # The fault may have begun at any step since the previous sample, and its effect may have grown over many steps.
    sampled = not chosen.is_exact and (chosen.is_out_of_band or measure_sampling_interval(found.facts.steps) > 1)
    return f"{'at or before' if sampled else 'at'} {unit} {chosen.since}"


def _tell_evidence(found: DiagnosisResult) -> str:
    chosen = found.decision.finding
    if chosen is None:
        return ""
    if _is_told_by_evidence(chosen):
        return tell_sentence(chosen.evidence.partition("; ")[2])
    also = ", ".join(filter(None, (each.tensor_name for each in found.decision.also[:2])))
    return tell_sentence(chosen.evidence) + (f" Also wrong by then: {also}." if also else "")


def tell_next_step(found: DiagnosisResult, advice: Sequence[str]) -> list[str]:
    """Return the first advice as the next step. For a wrong scale, also return the second advice, because the first advice
    is another cast, which only hides the fault.
    """
    is_scale = found.culprit is not None and found.culprit.kind == "scale"
    first, most = next(iter(advice), ""), 2 if is_scale else 1
    return [f"Next: {first[0].lower()}{first[1:]}", *advice[1:most]] if first else []


def tell_possible_misses(found: DiagnosisResult) -> list[str]:
    """Return sentences that name faults that we could have missed, but fewer sentences if the verdict names a cause."""
    missed = [f"We could have missed {part}." for part in found.not_compared]
    if found.decision.finding is not None:
        doubt = (
            ["The learning rate may be the cause: this run did not record it."]
            if found.may_hide_learning_rate_change
            else []
        )
        return doubt + missed
    rate = "" if found.records_learning_rate else "the learning rate (not recorded), "
    unseen = f"{rate}data, gradients, kernels or communication"
    if found.baseline is None:
        missed.append(f"We could have missed a fault in {unseen}, or an operand that was wrong from the first step.")
    elif found.cause != "software" and not (found.loss.harm == "none" and found.facts.has_same_batches):
        missed.append(f"We could have missed a fault in {unseen}.")
    absent = [table for table in TABLES.values() if table.checks and found.run.read_table(table.name).is_empty()]
    if absent:
        what = " and ".join(table.checks for table in absent)
        how = " and ".join(f"`{table.option}`" for table in absent)
        missed.append(f"To check {what} too, record with {how}.")
    return missed


def tell_verdict_reason(found: DiagnosisResult) -> str:
    """Return the reason for the verdict in a few sentences with numbers."""
    reference = tell_reference_loss(found.loss, found.run.unit)
    trouble = (_tell_trouble(found), _tell_evidence(found), _tell_unusual(found))
    return " ".join(filter(None, [*trouble, reference, *tell_possible_misses(found)]))


def tell_advice(found: DiagnosisResult, fix: TensorFix | None) -> list[str]:
    """Return sentences with the next steps. The first sentence is the advice, and the others say where to look.

    Args:
        fix: the first change on the ladder that helps the blamed tensor, or None.
    """
    chosen = [found.decision.finding] if found.decision.finding is not None else [*found.decision.likeliest]
    if not chosen and found.cause == "software":
        return [NOT_FP8_ADVICE]
    changes = [] if fix is None or not (fix.changes_cast or fix.needs_fp8_state) else [_tell_fix(fix, found)]
    told = list(dict.fromkeys(filter(None, [*changes, *(f.advise() for f in chosen)])))
    if found.decision.finding is not None or found.harm != "unknown":
        return told
    if found.loss.is_far_below:
        return ["Compare the data of both runs, batch by batch.", *told]
    if not found.run.loss.has_enough_losses:
        return ["Record the loss of each step: `report(loss=loss)` in a loop, `self.log` in a LightningModule.", *told]
    # Unusual findings come second, because healthy runs may show them.
    ask = "Give a baseline, a run that went well: it shows a gap that this run alone cannot."
    if found.baseline is not None:
        same = "" if found.facts.has_same_batches else "Give a baseline that saw the same batches, or repeat"
        ask = f"{same or 'Repeat'} `--baseline` for more seeds. Then we can detect smaller gaps."
    return [ask, *told]


def _tell_fix(fix: TensorFix, found: DiagnosisResult) -> str:
    """Return a sentence that names the change that helps a tensor, and all other operands that need the same change."""
    if fix.needs_fp8_state:
        return f"Restore the FP8 state of {fix.tensor_name} (scales and amax histories) from the checkpoint."
    back, name, culprit = "", fix.tensor_name, found.culprit
    if fix.chosen_option.kind == "undo" and fix.undo is not None:
        back = ", as in the baseline" if fix.undo.since is None else f", as before {found.run.unit} {fix.undo.since}"
        name = (
            culprit.tensor_names
            if culprit is not None and culprit.tensor_name == fix.tensor_name and culprit.tensor_names
            else name
        )
    what = f"Cast {name} in {fix.chosen_option.recipe}"
    if fix.chosen_option.recipe == "bf16":
        what = f"Leave {name} in BF16"
    elif back and len(fix.changed_scale_settings) == 1:
        ((setting, (now, then)),) = fix.changed_scale_settings.items()
        what = f"Set {setting} of {name} from {now} back to {then}"
    return f"{what}{back}{_tell_gain(fix)}."


def _tell_gain(fix: TensorFix) -> str:
    """Return a clause with the worst metric before and after the change, or an empty string if the metric is unknown."""
    now, then = fix.options[0].errors, fix.chosen_option.errors
    if fix.metric is None or now is None or then is None or getattr(then, fix.metric) is None:
        return ""
    about = "about " if fix.chosen_option.approximate else ""
    values = [format_metric_value(fix.metric, getattr(errors, fix.metric)) for errors in (now, then)]
    return f" ({LABELS[fix.metric][0]} {values[0]} -> {about}{values[1]})"


# Tensors ----------------------------------------------------------------------------------------------------------------


def explain_blame(row: Mapping[str, Any], found: DiagnosisResult, zero_since: int | None = None) -> str:
    """Explain why a tensor is blamed or not blamed.

    Args:
        row: row of `make_tensor_ranking_table`.
        zero_since: first step from which all values of the tensor are zero, or None.
    """
    candidates = (found.culprit, *found.decision.also, *(f for f in found.findings if f.is_out_of_band))
    named = next((f for f in candidates if f is not None and (f.layer, f.role) == (row["layer"], row["role"])), None)
    zero = "" if zero_since is None else f" All its values are zero since {found.run.unit} {zero_since}."
    if named is not None and named in (found.culprit, *found.decision.also):
        what = "Blamed" if named is found.culprit else "Also wrong by then"
        means = CAUSES[named.cause].means.format(tensor=named.tensor_name)
        return f"{what}: {means}, since {found.run.unit} {row['onset']} ({named.evidence}).{zero}"
    if row["onset"] is None:
        return (_tell_badly(row) or _tell_within(row, found)) + zero
    move = named.evidence if named is not None else describe_band_exit(row, zero_since)
    return f"Not blamed: out of band {_tell_after(row, found)} ({move}). {_tell_badly(row)}".strip() + zero


def _tell_after(row: Mapping[str, Any], found: DiagnosisResult) -> str:
    """Return a clause with the step at which a tensor left its band, and with the event that came before."""
    unit, onset, chosen = found.run.unit, row["onset"], found.decision.finding
    since = f"since {unit} {onset}"
    if chosen is not None and chosen.since is not None and onset >= chosen.since:
        what = chosen.tensor_name or ("the learning rate" if chosen.cause == "learning_rate" else "the cause")
        return f"{since}, {describe_step_distance(onset, chosen.since, unit)} {what}: a consequence"
    if found.divergence_step is not None and onset >= found.divergence_step:
        return f"{since}, {describe_step_distance(onset, found.divergence_step, unit)} the loss: a consequence"
    return f"{since}, and the loss does not show it" if found.divergence_step is None else f"{since}, less far than others"


def _tell_badly(row: Mapping[str, Any]) -> str:
    """Return a sentence if the format represents a tensor badly but this does no harm, otherwise an empty string."""
    lost, usually, ratio = row["lost"], row["lost_baseline"], row["mse_ratio"]
    if lost is None or usually is None or lost < _BADLY:
        return ""
    amax, usual = row["amax_run"], row["amax_baseline"]
    vanishes = row["role"] in GRADIENTS and amax is not None and usual and amax < usual / 2
    if vanishes and ratio is not None and ratio < 1:
        share = format_number(amax / usual, prefix="x")
        return f"Large relative error, but no effect: this gradient is nearly zero ({share} of the baseline's)."
    return "Large error, and no larger than in the baseline." if lost <= 1.2 * usually else ""


def _tell_within(row: Mapping[str, Any], found: DiagnosisResult) -> str:
    if row["has_baseline"]:
        return "Not blamed: within the baseline's band."
    if found.comparison is not None:
        return "Not blamed: the baseline has no such tensor, and alone it looks right."
    return "Not blamed: alone it looks right."


# The loss ---------------------------------------------------------------------------------------------------------------


def _tell_loss_shortly(found: DiagnosisResult) -> str:
    loss, unit = found.loss, found.run.unit
    if found.stopped_at is not None and found.stopped_at == found.divergence_step:
        return f"the optimizer takes no step from {unit} {found.stopped_at} on"
    if loss.run.all_nonfinite_from_step is not None:
        return f"the loss is NaN or infinite from {unit} {loss.run.all_nonfinite_from_step} on"
    if loss.harm_onset_step is not None:
        return f"the loss {_tell_departure_step(loss, unit, found.divergence_step)}"
    if found.harm == "likely":
        return "it probably harms the loss"
    if loss.harm == "none":
        above = loss.gap is None or loss.gap.compute_confidence_interval()[1] >= 0
        return "the loss follows the baseline's" if above else "the loss is not above the baseline's"
    if loss.is_far_below and loss.gap is not None:
        return f"the loss ends {loss.format_percentage(-loss.gap.percent)} below the baseline's"
    if loss.harm == "gap":
        return "the loss lies above the baseline's, by less than counts as harm"
    if loss.baseline is None:
        return "a negative loss from zero shows no harm alone" if loss.is_negative_from_zero else "the loss does not rise"
    return "we cannot tell whether the loss is harmed"


def tell_loss_headline(loss: LossOutcome, unit: str) -> str:
    """Return a headline of at most 25 words from losses alone, before tensors are read."""
    if loss.run.all_nonfinite_from_step is not None:
        return f"The loss is NaN or infinite from {unit} {loss.run.all_nonfinite_from_step} on."
    if loss.harm_onset_step is not None:
        return f"The loss {_tell_departure_step(loss, unit, loss.harm_onset_step)}."
    if loss.is_far_below and loss.gap is not None:
        return f"The loss ends {loss.format_percentage(-loss.gap.percent)} below the baseline's."
    if loss.harm in ("none", "gap"):
        return "The loss follows the baseline's." if loss.harm == "none" else "The loss lies slightly above the baseline's."
    return "We cannot tell from the loss whether the run is harmed."


def _tell_departure_step(loss: LossOutcome, unit: str, since: int | None) -> str:
    if loss.harm == "likely" and loss.level_shift is not None:
        return f"jumped to another level at {unit} {loss.level_shift[0]}"
    return _tell_departed(loss, unit, since)


def _tell_departed(loss: LossOutcome, unit: str, since: int | None, too: str = "") -> str:
    """Return a clause with the step of the harm: a loss *diverged* if it rises to the end, and *departed* if only a test
    shows a difference. The test smooths losses, so its step is approximate.

    If a loss leaves the baseline's loss but still falls, it has departed, even if it later rises to the end.
    """
    if loss.baseline is None:
        return f"{'diverged' if loss.diverges else 'jumped to another level'}{too} at {unit} {since}"
    lowest = loss.run.minimum_step_and_loss
    falls_on = lowest is not None and loss.rise_step is not None and lowest[0] > loss.rise_step + loss.run.half
    if loss.diverges and not falls_on:
        return f"diverged{too} at {unit} {since}"
    return f"departed from the baseline's{too} around {unit} {since}"


def tell_loss_outcome(loss: LossOutcome, unit: str = "step", since: int | None = None) -> str:
    """Describe the outcome of the loss in a sentence or two.

    Args:
        unit: unit of the steps, such as `step` or `sample`.
        since: step from which the run is harmed, if other evidence shows it.
    """
    since = loss.rise_step if since is None else since
    if loss.run.all_nonfinite_from_step is not None:
        return f"The loss is NaN or infinite from {unit} {loss.run.all_nonfinite_from_step} on."
    if not loss.run.has_enough_losses:
        n = len(loss.run.losses)
        if not n:
            return "The run recorded no loss."
        return f"{n} loss{'' if n == 1 else 'es'} {'is' if n == 1 else 'are'} too few to judge the run."
    if loss.baseline is None:
        return _tell_loss_alone(loss, unit, since)
    if loss.gap is None:
        return "We cannot compare the losses: fewer than 10 are in common, or the baseline's are zero."
    return _tell_loss_against_baseline(loss, loss.gap, unit, since)


def _tell_loss_alone(loss: LossOutcome, unit: str, since: int | None) -> str:
    if loss.rise is not None:
        return f"The loss rose by {loss.format_percentage(loss.rise[1], loss.rise[0])} at {unit} {loss.rise[0]}."
    if loss.run.divergence_step is not None and not loss.is_negative_from_zero:
        return f"The loss diverged at {unit} {since}: it rises for good."
    if loss.level_shift is not None and not loss.is_negative_from_zero:
        step, percent = loss.level_shift
        jump = loss.format_percentage(percent, step)
        return f"The loss jumped by {jump} at {unit} {step} and stays there, so harm is likely."
    if loss.is_negative_from_zero:
        return "The loss begins at zero and is negative, so a rise alone shows no harm. Give a baseline."
    visible = loss.run.smallest_visible_rise
    seen = f" (a rise below {loss.format_percentage(visible)} would not show)" if np.isfinite(visible) else ""
    return f"The loss does not rise{seen}. Without a baseline, we cannot see a gap."


def _tell_loss_against_baseline(loss: LossOutcome, gap: Gap, unit: str, since: int | None) -> str:
    whose = "the baseline's" if loss.seeds is None else "the baselines' mean"
    whose = "the reference run's" if loss.baseline is loss.reference else whose
    if gap.ends_nonfinite:
        return f"The loss departed from {whose} around {unit} {since} and ends without a number."
    end = tell_gap_end(gap, whose, loss.seeds)
    if loss.is_far_below:
        return f"The loss {end}. {CHECK_DATA}"
    if loss.rise is not None:
        rise = loss.format_percentage(loss.rise[1], loss.rise[0])
        return f"The loss rose by {rise} at {unit} {loss.rise[0]} and {end}."
    if loss.harm == "harmful":
        return f"The loss {_tell_departed(loss, unit, since)} and {end}."
    if loss.harm == "likely" and loss.level_shift is not None:
        step, percent = loss.level_shift
        return f"The loss jumped by {loss.format_percentage(percent, step)} at {unit} {step} and {end}, so harm is likely."
    if loss.harm == "gap":
        return f"The loss {end}, less than the {loss.max_gap:g}% that count as harm."
    if loss.harm == "none":
        return f"The loss {'follows' if gap.compute_confidence_interval()[1] >= 0 else 'is not above'} {whose}: it {end}."
    low = gap.compute_confidence_interval()[0]
    if low > loss.max_gap and not gap.paired:
        return f"The loss {end}. {_tell_other_seeds(loss, gap)}"
    limit = loss.format_percentage(loss.max_gap)
    return f"We cannot tell whether the loss is harmed ({limit} or more above {whose}): it {end}."


def tell_gap_end(gap: Gap, whose: str = "the baseline's", seeds: SeedSpread | None = None) -> str:
    """Return the predicate of a clause about the end of the loss. Its subject is *the loss* or *it*."""
    low, high = gap.compute_confidence_interval()
    side = "above" if gap.percent >= 0 else "below"
    amount = tell_percent(abs(gap.percent), gap.of_range)
    bounds = (low, high) if gap.percent >= 0 else (-high, -low)
    interval = f"95% interval {format_number(bounds[0])} to {format_number(bounds[1])}%"
    if low < 0 < high:
        interval = f"95% interval {format_number(-low)}% below to {format_number(high)}% above"
    # If a loss is far from the baseline's loss, we cannot tell whether both saw the same batches.
    batches = "same batches" if gap.paired else "batches not matched"
    if seeds is not None:
        batches = f"mean of {seeds.n} runs of other batches"
    return f"ended {amount} {side} {whose} ({interval}; {batches})"


def _tell_other_seeds(loss: LossOutcome, gap: Gap) -> str:
    if loss.seeds is None:
        limit = loss.seed_gap_limit
        return (
            f"Another seed can explain up to {format_number(limit)}%."
            if gap.percent <= limit
            else "One baseline cannot rule out the seed."
        )
    reach = loss.seeds.compute_seed_limit(0.95)
    if gap.percent > reach:
        return "Fewer than 1 in 20 runs of another seed end as far above; that alone is not sure enough."
    return f"1 in 20 runs of another seed ends {format_number(reach)}% or more above this mean."


def tell_reference_loss(loss: LossOutcome, unit: str = "step") -> str:
    """Compare the reference run's loss with the run's loss in sentences. Return an empty string without a reference run."""
    if loss.reference is None:
        return ""
    other, apart = loss.reference_outcome, loss.gap_to_reference
    if other is None:
        return "The reference run has too few losses to judge."
    if other.harm_onset_step is not None:
        too = " too" if loss.harm_onset_step is not None else ""
        lead = f"The reference run {_tell_departed(other, unit, other.harm_onset_step, too)}."
    elif loss.harm_onset_step is not None and loss.reference_reaches_end:
        lead = "The reference run is not harmed."
    else:
        lead = ""
    if loss.baseline is loss.reference:
        return lead
    if apart is None:
        return f"{lead} We cannot compare the losses of the run and the reference run.".strip()
    if not loss.reference_reaches_end:
        return (
            f"{lead} The reference run ends at {unit} {loss.reference.steps[-1]}, too early to judge the run's end.".strip()
        )
    if apart.ends_nonfinite:
        return lead
    low, high = apart.compute_confidence_interval()
    rest = f"The run's gap to the reference run is {tell_percent(apart.percent, apart.of_range, True)}"
    rest += f" (95% interval {format_number(low, signed=True)} to {format_number(high, signed=True)}%)"
    if loss.harm != "none" and not loss.is_far_below and not loss.differs_from_reference:
        rest += (
            ", so FP8 does not explain the loss" if loss.differs_from_reference is False else ", too uncertain to blame FP8"
        )
    return f"{lead} {rest}.".strip()

"""Why a tensor is blamed or is not, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.keys import GRADIENTS
from ...numerics.metric_names import LABELS
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.ranking import BESIDES, BLAMED, REST
from ..diagnosis.rules.finding import CAUSES, NOT_FP8, Finding
from .told import died, sentence, steps_apart, value_of

#: share of a tensor that is lost, from which a format holds it badly
BADLY = 0.1
#: how many times what the baseline loses is no worse
_NO_WORSE = 1.2
#: part of the baseline's largest magnitude below which a gradient vanishes
_VANISHES = 0.5


def why(row: Mapping[str, Any], found: Diagnosis, zero_since: int | None = None) -> str:
    """Why a tensor is blamed or is not.

    Args:
        row: of `ranked`.
        zero_since: first sample from which on all its values are zero; None: they are not.
    """
    told = _why(row, found, died(row, zero_since))
    return told if zero_since is None else f"{told} All its values are zero since {found.run.unit} {zero_since}."


def _why(row: Mapping[str, Any], found: Diagnosis, is_dead: bool) -> str:
    named = _finding_of(row, found)
    if named is not None and row["group"] in (BLAMED, BESIDES):
        verdict = "blamed" if row["group"] == BLAMED else "also wrong by then"
        return sentence(f"{verdict}: {CAUSES[named.cause]}, {_since(row, found)} ({named.evidence})")
    held = _badly_held(row)
    if row["group"] == REST:
        return held or _nothing_wrong(row, found)
    out = "" if is_dead else f" ({_what_is_out(row, named)})"
    told = sentence(f"not blamed: it is out of band {_after(row, found)}{out}")
    return f"{told} {held}" if held else told


def _finding_of(row: Mapping[str, Any], found: Diagnosis) -> Finding | None:
    key = row["layer"], row["role"]
    candidates = (found.culprit, *found.blame.besides, *(f for f in found.findings if f.rule == "operand"))
    return next((f for f in candidates if f is not None and (f.layer, f.role) == key), None)


def _since(row: Mapping[str, Any], found: Diagnosis) -> str:
    unit, onset, diverged = found.run.unit, row["onset"], found.divergence_step
    if onset is None:
        return f"since an unknown {unit}"
    if onset == found.run.metrics.steps[0]:
        return "from the start or before"
    loss = "" if diverged is None else f", {steps_apart(onset, diverged, unit)} the loss"
    return f"since {unit} {onset}{loss}"


def _what_is_out(row: Mapping[str, Any], named: Finding | None) -> str:
    if named is not None and named.cause != "unknown":
        return f"{named.cause.replace('_', ' ')}: {named.evidence}"
    if row["metric"] is None:
        return "it is not what it was before" if named is None else named.evidence
    if row["metric"] == "nonfinite":
        return LABELS["nonfinite"][0]
    expected, value = (value_of(row["metric"], row[name]) for name in ("expected", "value"))
    return f"{LABELS[row['metric']][0]} {expected} -> {value}"


def _after(row: Mapping[str, Any], found: Diagnosis) -> str:
    """Since when, and what came before it or outweighs it."""
    unit, onset, culprit, blamed = found.run.unit, row["onset"], found.culprit, found.blame.finding
    if onset is None:
        return "at no known step"
    since = f"since {unit} {onset}"
    if culprit is not None and culprit.since is not None and culprit.operand:
        if onset > culprit.since:
            return f"{since}, {steps_apart(onset, culprit.since, unit)} {culprit.operand}"
        if row["excess"] is not None and culprit.excess is not None and row["excess"] < culprit.excess:
            least = f"{_times(row['excess'])} the least that counts"
            return f"{since}, and less far: {least}, {culprit.operand} {_times(culprit.excess)}"
        return f"{since}, which alone does not tell that it went wrong by itself"
    if found.cause in NOT_FP8 and blamed is not None and blamed.since is not None and onset >= blamed.since:
        what = {"learning_rate": "the learning rate departs", "weight_decay": "the weights shrink"}
        return f"{since}, {steps_apart(onset, blamed.since, unit)} {what.get(found.cause, 'the cause')}: a consequence"
    if found.divergence_step is not None and onset >= found.divergence_step:
        return f"{since}, {steps_apart(onset, found.divergence_step, unit)} the loss diverges: a consequence"
    if found.divergence_step is None:
        return f"{since}, and the loss does not show it"
    return f"{since}, which alone does not tell that it went wrong by itself"


def _times(excess: float) -> str:
    return f"{excess:.3g} times"


def _badly_held(row: Mapping[str, Any]) -> str:
    """That a tensor loses much and does no harm by it, where that can be told."""
    lost, usually, ratio = row["lost"], row["lost_baseline"], row["mse_ratio"]
    if lost is None or usually is None or lost < BADLY:
        return ""
    amax, usual = row["amax_run"], row["amax_baseline"]
    vanishes = row["role"] in GRADIENTS and amax is not None and usual and amax < _VANISHES * usual
    if vanishes and ratio is not None and ratio < 1:
        smaller = f"its largest magnitude is x{amax / usual:.2g} of the baseline's, its mean squared error x{ratio:.2g}"
        return f"Badly held and harmless: the gradient vanishes ({_losses(row)}; {smaller})."
    if lost <= _NO_WORSE * usually:
        return f"Badly held, and no worse than in the baseline ({_losses(row)})."
    return ""


def _losses(row: Mapping[str, Any]) -> str:
    told = [(name, row[f"{name}_run"]) for name in ("relative_error", "underflow_pct")]
    return ", ".join(f"{LABELS[name][0]} {value_of(name, value)}" for name, value in told if value is not None)


def _nothing_wrong(row: Mapping[str, Any], found: Diagnosis) -> str:
    if row["has_baseline"]:
        return "Not blamed: it stays in the baseline's band."
    if found.comparison is not None:
        return "Not blamed: the baseline has no such tensor, and alone it shows nothing wrong."
    return "Not blamed: the record alone shows nothing wrong with it."

"""What a verdict may call a fault and be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: by kind; what the record does not show is software
_OF_KIND: dict[str, set[str]] = {
    "none": {"none"},
    "outlier": {"outlier"},
    "stale": {"stale_scale"},
    "margin": {"changed_recipe"},
    "e5m2_forward": {"changed_recipe"},
    "nan_operand": {"nonfinite"},
    "nan_loss": {"nonfinite"},
    "nan_gradient": {"nonfinite", "skipped"},
    "learning_rate": {"learning_rate"},
    "weight_decay": {"weight_decay", "software"},
    "gradient_layer": {"frozen_weights", "software"},
    "repeated_data": {"software"},
    "no_mask": {"software"},
    "wrong_labels": {"software"},
    "loss_scale": {"multiplier"},
}


def right_causes(told: Mapping[str, Any], interval: int) -> set[str]:
    """Causes, as `diagnose` calls them.

    Args:
        told: of `records.truths`.
        interval: of the samples; what takes no longer looks like a jump.
    """
    kind, fault = told["kind"], told["fault"]
    if "parts" in fault:
        return set().union(*(_of_operand(part, interval) for part in fault["parts"]))
    if kind == "gradient_sum":
        return {"multiplier"} if fault["at_the_loss"] else {"multiplier", "software"}
    if kind == "nan_operand" and not told["harmful"] and not is_sampled(told, interval):
        return {"nonfinite", "none", "unknown"}  # one step between two samples, whose loss may be finite all the same
    if kind in _OF_KIND:
        # What the record does not show need not be told if it did no harm.
        return _OF_KIND[kind] | ({"none"} if "software" in _OF_KIND[kind] and not told["harmful"] else set())
    causes = _of_operand(fault, interval)
    if not is_sampled(told, interval):
        causes |= {"unknown", "software"} | (set() if told["harmful"] else {"none"})
    # What was so at the first sample, or is over after few, has no jump to be told by; and what is slight may be nothing.
    if kind in ("from_the_start", "transient") and "bits" in fault:
        causes |= {"clipping" if fault["bits"] > 0 else "underflow"}
    return causes | {"none"} if kind == "harmless" else causes


def is_sampled(told: Mapping[str, Any], interval: int) -> bool:
    """Whether any sample lies in the steps that a fault acts in."""
    until, first = told["fault"].get("until"), -(-told["onset"] // interval) * interval
    return bool(first < (told["steps"] if until is None else until))


def _of_operand(fault: Mapping[str, Any], interval: int) -> set[str]:
    """Of a fault of one operand, by what it does to it."""
    if "bits" not in fault:
        return {"outlier"}
    gradual = "clipping" if fault["bits"] > 0 else "underflow"
    if fault["over"] == 1:
        return {"corrupted_scale"}
    return {gradual, "corrupted_scale"} if fault["over"] <= interval else {gradual}

"""Scalars for any logger: tags that lead with the question, few enough to stay readable."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.keys import ROLES
from ..core.layer_names import aggregate_key, aggregate_of, few_experts, is_aggregate
from ..core.sample import Sample
from ..numerics.metric_names import ACTIVATION_METRICS, METRICS, UNITS, WORSE

#: streamed as scalars, each tensor its own tag
STREAMED = ("scale", *METRICS)
#: experts of a layer that get tags of their own beside their aggregate, for each metric the worst
EXPERTS_SHOWN = 3
#: metrics that are streamed for recipes that were not in use
_WEIGHED = ("underflow_pct", "overflow_pct", "relative_error")

Write = Callable[[dict[str, float], int], None]
#: metrics whose axis would be unreadable, by what is streamed instead: its name, and how it is computed; None has no tag
ON_LOG_AXES: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "mse": ("mse_log10", lambda mse: math.log10(mse) if mse > 0 else None),
    "cosine": ("cosine_distance_log10", lambda cosine: math.log10(max(1 - cosine, 1e-16))),
}


#: metrics of tensors that nothing casts, and what of all layers is streamed
_OF_UNCAST = ("amax", "underflow_pct", "relative_error")
_KINDS: dict[str, Callable[[list[float]], float]] = {"worst": max, "median": statistics.median}
_ENDS: dict[str, Callable[[list[float]], float]] = {"smallest": min, "median": statistics.median, "largest": max}
_OF_ACTIVATIONS = [name for name in ACTIVATION_METRICS if name not in ("rows", "channel")]


def tag_of(metric: str) -> str:
    """How tags call a metric."""
    return ON_LOG_AXES[metric][0] if metric in ON_LOG_AXES else metric


class TagBudget:
    """Which tensors get tags of their own when not all can: the worst of each role, kept once chosen.

    Of the experts of a layer it is a few in any case, and where not all tensors can have tags, they come last.
    """

    def __init__(self, max_tags: int) -> None:
        self._free = max_tags
        self._max_tags = max_tags
        self._admitted: dict[tuple[str, str], set[str]] = defaultdict(set)

    def choose(self, metric: str, role: str, worst_first: Sequence[str], tensors: int) -> set[str]:
        """Layers whose `metric` of `role` is written, in this step and all that follow.

        Args:
            worst_first: layers with a value in this step.
            tensors: how many tensors could have tags in this step, over all roles.
        """
        admitted = self._admitted[metric, role]
        quota = self._free
        if tensors * len(STREAMED) > self._max_tags:
            quota = min(quota, self._max_tags // (len(STREAMED) * len(ROLES)) - len(admitted))
        few = few_experts(dict.fromkeys((*admitted, *worst_first)), aggregate_of, EXPERTS_SHOWN)
        new = sorted((layer for layer in few if layer not in admitted), key=lambda layer: aggregate_of(layer) is not None)
        new = new[: max(0, quota)]
        self._free -= len(new)
        admitted.update(new)
        return admitted


class ScalarRecorder:
    """Streams metrics as scalars through `write(tags, step)`."""

    #: loggers are not made for use from two threads
    in_callers_thread = True

    def __init__(self, write: Write, max_tags: int) -> None:
        self._write = write
        self._budget = TagBudget(max_tags)

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def record(self, sample: Sample) -> None:
        """Write one sampled step."""
        tags, _ = self.scalars(sample)
        self._write(tags, sample.step)

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """The host logs its loss itself."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """The host logs them itself."""

    def close(self) -> None:
        """Nothing is held back."""

    def scalars(self, sample: Sample) -> tuple[dict[str, float], dict[tuple[str, str], list[str]]]:
        """The tags of a step, and by (metric, role) the layers that have one, worst first."""
        tags: dict[str, float] = {}
        worst: dict[tuple[str, str], list[str]] = {}
        keys = list(zip(sample.columns["layer"], sample.columns["role"], strict=True))
        tensors = len(few_experts(keys, lambda key: aggregate_key(*key), EXPERTS_SHOWN))
        for role in ROLES:
            rows = [i for i, r in enumerate(sample.columns["role"]) if r == role]
            for metric in STREAMED:
                values = {sample.columns["layer"][i]: sample.columns[metric][i] for i in rows}
                values = {layer: v for layer, v in values.items() if v is not None and math.isfinite(v)}
                if not values:
                    continue
                found, worst[metric, role] = self._streamed(metric, role, values, tensors)
                tags |= found
        tags |= self._of_products(sample.outputs, "relative_error", "output_error", tensors)
        tags |= self._of_products(sample.verification, "error_over_bound", "error_over_bound", tensors)
        if shares := _gradient_shares(sample.states):
            tags |= self._streamed("gradient_share_pct", "weight_gradient", shares, tensors)[0]
        tags |= _of_uncast("fp8_states", sample.states) | _activations(sample)
        return tags | _update_to_weights(sample) | _unscaled(sample) | _what_if(sample), worst

    def _streamed(
        self, metric: str, of: str, values: Mapping[str, float], tensors: int
    ) -> tuple[dict[str, float], list[str]]:
        """Tags of a metric of a role or product, by layer, and the layers that have one of their own, worst first."""
        sign = WORSE.get(metric, 1)
        ranked = sorted(values, key=lambda layer: sign * values[layer], reverse=True)
        chosen = self._budget.choose(metric, of, ranked, tensors)
        shown = [layer for layer in ranked if layer in chosen]
        name, values = tag_of(metric), _on_axis(metric, values)
        tags = {f"fp8_{name}/{of}/{layer}": values[layer] for layer in shown if layer in values}
        if single := [values[layer] for layer in ranked if layer in values and not is_aggregate(layer)]:
            tags[f"fp8/{name}/{of}/worst"] = single[0]
            tags[f"fp8/{name}/{of}/median"] = statistics.median(single)
        return tags, shown

    def _of_products(self, columns: Mapping[str, Sequence[Any]], metric: str, tag: str, tensors: int) -> dict[str, float]:
        """A metric of what GEMMs put out, by product."""
        values = defaultdict[str, dict[str, float]](dict)
        rows = zip(*(columns[name] for name in ("product", "layer", metric)), strict=True) if columns else ()
        for product, layer, value in rows:
            if value is not None:
                values[product][layer] = value
        return {t: v for p, of in values.items() for t, v in self._streamed(tag, p, of, tensors)[0].items()}


def _on_axis(metric: str, values: Mapping[str, float]) -> Mapping[str, float]:
    """Values as they are streamed, by layer."""
    if metric not in ON_LOG_AXES:
        return values
    found = {layer: ON_LOG_AXES[metric][1](value) for layer, value in values.items()}
    return {layer: value for layer, value in found.items() if value is not None}


def _of_uncast(tag: str, columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """The worst and the median of tensors that nothing casts, as they are and under each what-if recipe."""
    values = defaultdict[str, list[float]](list)
    rows = zip(*(columns[name] for name in ("role", "recipe", "scale_source", *_OF_UNCAST)), strict=True) if columns else ()
    for role, recipe, source, *found in rows:
        under = f"/{recipe}" if source == "what-if" else ""
        for metric, value in zip(_OF_UNCAST, found, strict=True):
            if value is not None and math.isfinite(value):
                values[f"{tag}/{metric}/{role}{under}"].append(value)
    return {f"{name}/{kind}": of(found) for name, found in values.items() for kind, of in _KINDS.items()}


def _gradient_shares(states: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Of the squared gradient norm, in percent, by layer."""
    rows = zip(*(states.get(name, ()) for name in ("layer", "role", "share_pct")), strict=False)
    return {layer: share for layer, role, share in rows if role == "weight_gradient" and share is not None}


def _activations(sample: Sample) -> dict[str, float]:
    """Those of all tensors, and the smallest, median and largest of what activations have of their own."""
    columns, values = sample.activations, defaultdict[str, list[float]](list)
    for metric in _OF_ACTIVATIONS if columns else ():
        for role, value in zip(columns["role"], columns.get(metric, ()), strict=False):
            if value is not None:
                values[f"fp8_activations/{metric}/{role}"].append(value)
    tags = {f"{name}/{kind}": of(found) for name, found in values.items() for kind, of in _ENDS.items()}
    return _of_uncast("fp8_activations", columns) | tags


def _update_to_weights(sample: Sample) -> dict[str, float]:
    """What a step adds to a weight over the weight: the smallest, median and largest of all layers."""
    rows = zip(sample.states.get("layer", ()), sample.states.get("update_to_weight", ()), strict=False)
    found = [ratio for layer, ratio in rows if ratio is not None and not is_aggregate(layer)]
    return {f"fp8_states/update_to_weight/{kind}": of(found) for kind, of in _ENDS.items()} if found else {}


def _unscaled(sample: Sample) -> dict[str, float]:
    """The worst and the median of what dY is in the units of the loss, and what it is multiplied by."""
    multiplier, tags = sample.scalars.get("grad_scale"), dict[str, float]()
    for metric in UNITS if multiplier else ():
        if found := [value for value in sample.columns[f"unscaled_{metric}"] if value is not None and math.isfinite(value)]:
            tags[f"fp8/unscaled_{metric}/grad_output/worst"] = max(found) if WORSE[metric] > 0 else min(found)
            tags[f"fp8/unscaled_{metric}/grad_output/median"] = statistics.median(found)
    return tags | ({"fp8/grad_scale": multiplier} if multiplier else {})


def _what_if(sample: Sample) -> dict[str, float]:
    """The worst and the median of each role under each what-if recipe, beside those in use."""
    columns, tags = sample.what_if, dict[str, float]()
    for metric in _WEIGHED if columns else ():
        values: dict[str, list[float]] = defaultdict(list)
        of_rows = zip(columns["layer"], columns["recipe"], columns["role"], columns[metric], strict=True)
        for layer, recipe, role, value in of_rows:
            if value is not None and math.isfinite(value) and not is_aggregate(layer):
                values[f"{role}/{recipe}"].append(value)
        for name, found in values.items():
            tags[f"fp8_what_if/{metric}/{name}/worst"] = max(found)
            tags[f"fp8_what_if/{metric}/{name}/median"] = statistics.median(found)
    return tags

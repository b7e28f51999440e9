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
from ..core.table import Columns, load_modules
from ..numerics.metric_names import METRICS, WORSE

#: streamed as scalars, each tensor its own tag
STREAMED = ("scale", *METRICS)
#: experts of a layer that get tags of their own beside their aggregate, for each metric the worst
EXPERTS_SHOWN = 3
Write = Callable[[dict[str, float], int], None]
#: metrics whose axis would be unreadable, by what is streamed instead: its name, and how it is computed; None has no tag
ON_LOG_AXES: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "mse": ("mse_log10", lambda mse: math.log10(mse) if mse > 0 else None),
    "cosine": ("cosine_distance_log10", lambda cosine: math.log10(max(1 - cosine, 1e-16))),
}


#: how values of all layers are summed up
WORST: dict[str, Callable[[list[float]], float]] = {"worst": max, "median": statistics.median}
SPREAD: dict[str, Callable[[list[float]], float]] = {"smallest": min, "median": statistics.median, "largest": max}
#: metrics that are summed up of tensors that nothing casts
_OF_UNCAST = ("amax", "underflow_pct", "relative_error")


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
        self._write(self.scalars(sample).values, sample.step)

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """The host logs its loss itself."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """The host logs them itself."""

    def close(self) -> None:
        """Nothing is held back."""

    def scalars(self, sample: Sample) -> Tags:
        """Return the tags of a step."""
        tags = Tags(self._budget, sample)
        for module in load_modules("scalars"):
            module.add_scalars(sample, tags)
        return tags


class Tags:
    """The tags of one sampled step, to which each feature adds its own."""

    def __init__(self, budget: TagBudget, sample: Sample) -> None:
        """
        Args:
            budget: of tags of single tensors.
        """
        self._budget = budget
        keys = list(zip(sample.columns["layer"], sample.columns["role"], strict=True))
        self._tensors = len(few_experts(keys, lambda key: aggregate_key(*key), EXPERTS_SHOWN))
        self.values: dict[str, float] = {}
        #: by (metric, role) the layers that have a tag, worst first
        self.worst: dict[tuple[str, str], list[str]] = {}

    def stream(self, metric: str, role: str, values: Mapping[str, float]) -> None:
        """Add a metric of single layers, the worst first, and the worst and the median of all.

        Args:
            role: or product.
            values: by layer, finite.
        """
        sign = WORSE.get(metric, 1)
        ranked = sorted(values, key=lambda layer: sign * values[layer], reverse=True)
        chosen = self._budget.choose(metric, role, ranked, self._tensors)
        shown = [layer for layer in ranked if layer in chosen]
        name, values = tag_of(metric), _on_axis(metric, values)
        self.values |= {f"fp8_{name}/{role}/{layer}": values[layer] for layer in shown if layer in values}
        if single := [values[layer] for layer in ranked if layer in values and not is_aggregate(layer)]:
            self.values[f"fp8/{name}/{role}/worst"] = single[0]
            self.values[f"fp8/{name}/{role}/median"] = statistics.median(single)
        self.worst[metric, role] = shown

    def stream_products(self, columns: Columns, metric: str, name: str) -> None:
        """Add a metric of the products of GEMMs.

        Args:
            name: of the metric in tags.
        """
        values = defaultdict[str, dict[str, float]](dict)
        rows = zip(*(columns[name] for name in ("product", "layer", metric)), strict=True) if columns else ()
        for product, layer, value in rows:
            if value is not None:
                values[product][layer] = value
        for product, by_layer in values.items():
            self.stream(name, product, by_layer)

    def sum_up(self, values: Mapping[str, list[float]], kinds: Mapping[str, Callable[[list[float]], float]]) -> None:
        """Add what all layers have together.

        Args:
            values: by tag, each with at least one.
            kinds: `WORST` or `SPREAD`.
        """
        self.values |= {f"{tag}/{kind}": of(found) for tag, found in values.items() for kind, of in kinds.items()}

    def sum_up_uncast(self, prefix: str, columns: Columns) -> None:
        """Add the worst and the median of tensors that nothing casts, as they are and under each what-if recipe."""
        values = defaultdict[str, list[float]](list)
        names = ("role", "recipe", "scale_source", *_OF_UNCAST)
        rows = zip(*(columns[name] for name in names), strict=True) if columns else ()
        for role, recipe, source, *found in rows:
            under = f"/{recipe}" if source == "what-if" else ""
            for metric, value in zip(_OF_UNCAST, found, strict=True):
                if value is not None and math.isfinite(value):
                    values[f"{prefix}/{metric}/{role}{under}"].append(value)
        self.sum_up(values, WORST)


def _on_axis(metric: str, values: Mapping[str, float]) -> Mapping[str, float]:
    """Values as they are streamed, by layer."""
    if metric not in ON_LOG_AXES:
        return values
    found = {layer: ON_LOG_AXES[metric][1](value) for layer, value in values.items()}
    return {layer: value for layer, value in found.items() if value is not None}

"""Scalars of a step for any logger: a limited number of tags for single tensors, and a summary of the step."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import find_aggregate_key, find_expert_aggregate, is_expert_aggregate, limit_experts_per_layer
from ..core.sample import Recorder, Sample
from ..core.scale_sources import classify_run_quantization, make_unquantized_note
from ..core.table import Columns, load_feature_modules
from ..numerics.limits import MADE_UP
from ..numerics.metric_names import METRICS, WORSE
from ..options.trigger_rules import score_early_warning

#: metrics with a tag for each tensor
STREAMED = ("scale", *METRICS)
#: number of a layer's experts that get their own tags in addition to the aggregate: the worst experts for each metric
EXPERTS_SHOWN = 3
Write = Callable[[dict[str, float], int], None]
#: metrics that would be unreadable on a linear axis, each with the name and formula of the scalar that we log instead; if
#: the formula returns None, we log nothing
ON_LOG_AXES: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "mse": ("mse_log10", lambda mse: math.log10(mse) if mse > 0 else None),
    "cosine": ("cosine_distance_log10", lambda cosine: math.log10(max(1 - cosine, 1e-16))),
}


#: functions that reduce the values of all layers to one value
WORST: dict[str, Callable[[list[float]], float]] = {"worst": max, "median": statistics.median}
SPREAD: dict[str, Callable[[list[float]], float]] = {"smallest": min, "median": statistics.median, "largest": max}
#: metrics of unquantized tensors in the summary
_OF_UNCAST = ("amax", "underflow_pct", "relative_error")


def make_metric_tag(metric: str) -> str:
    """Return the name of a metric in tags."""
    return ON_LOG_AXES[metric][0] if metric in ON_LOG_AXES else metric


class TagBudget:
    """Chooses which tensors get tags, if there are too many: the worst tensors of each role. A chosen tensor keeps its tags.

    A layer's experts get only a few tags. If tags are scarce, experts come last.
    """

    def __init__(self, max_tags: int) -> None:
        self._free = max_tags
        self._max_tags = max_tags
        self._admitted: dict[tuple[str, str], set[str]] = defaultdict(set)

    def choose(self, metric: str, role: str, worst_first: Sequence[str], tensors: int) -> set[str]:
        """Return the layers whose `metric` of `role` is written, in this step and all later steps.

        Args:
            worst_first: layers that have a value in this step, worst first.
            tensors: number of tensors of all roles that could have tags in this step.
        """
        admitted = self._admitted[metric, role]
        quota = self._free
        if tensors * len(STREAMED) > self._max_tags:
            quota = min(quota, self._max_tags // (len(STREAMED) * len(ROLES)) - len(admitted))
        few = limit_experts_per_layer(dict.fromkeys((*admitted, *worst_first)), find_expert_aggregate, EXPERTS_SHOWN)
        new = sorted(
            (layer for layer in few if layer not in admitted), key=lambda layer: find_expert_aggregate(layer) is not None
        )
        new = new[: max(0, quota)]
        self._free -= len(new)
        admitted.update(new)
        return admitted


class ScalarRecorder(Recorder):
    """Streams metrics as scalars through `write(tags, step)`. The framework logs its losses itself."""

    #: runs in the training thread, because loggers may not be called from two threads
    in_callers_thread = True

    def __init__(self, write: Write, max_tags: int) -> None:
        self._write = write
        self._budget = TagBudget(max_tags)

    def record(self, sample: Sample) -> None:
        """Write one sampled step."""
        self._write(self.collect_tags(sample).values, sample.step)

    def collect_tags(self, sample: Sample) -> ScalarTags:
        """Return the tags of a step."""
        tags = ScalarTags(self._budget, sample)
        for module in load_feature_modules("scalars"):
            module.add_scalars(sample, tags)
        return tags


class ScalarTags:
    """The tags of one sampled step. Each feature adds its own tags."""

    def __init__(self, budget: TagBudget, sample: Sample) -> None:
        """
        Args:
            budget: limits the number of tags for single tensors.
        """
        self._budget = budget
        keys = list(zip(sample.operand_columns["layer"], sample.operand_columns["role"], strict=True))
        self._tensors = len(limit_experts_per_layer(keys, lambda key: find_aggregate_key(*key), EXPERTS_SHOWN))
        self.values: dict[str, float] = {}
        #: layers that have a tag, by (metric, role), worst first
        self.worst: dict[tuple[str, str], list[str]] = {}

    def add_layer_metric(self, metric: str, role: str, values: Mapping[str, float]) -> None:
        """Add a metric of single layers, and the worst and the median of all layers.

        Args:
            role: a role or a product.
            values: finite values, by layer.
        """
        sign = WORSE.get(metric, 1)
        ranked = sorted(values, key=lambda layer: sign * values[layer], reverse=True)
        chosen = self._budget.choose(metric, role, ranked, self._tensors)
        shown = [layer for layer in ranked if layer in chosen]
        name, values = make_metric_tag(metric), _on_axis(metric, values)
        self.values |= {f"fp8_{name}/{role}/{layer}": values[layer] for layer in shown if layer in values}
        if single := [values[layer] for layer in ranked if layer in values and not is_expert_aggregate(layer)]:
            self.values[f"fp8/{name}/{role}/worst"] = single[0]
            self.values[f"fp8/{name}/{role}/median"] = statistics.median(single)
        self.worst[metric, role] = shown

    def add_product_metric(self, columns: Columns, metric: str, name: str) -> None:
        """Add a metric of the products of GEMMs.

        Args:
            name: the metric's name in tags.
        """
        values = defaultdict[str, dict[str, float]](dict)
        rows = zip(*(columns[name] for name in ("product", "layer", metric)), strict=True) if columns else ()
        for product, layer, value in rows:
            if value is not None:
                values[product][layer] = value
        for product, by_layer in values.items():
            self.add_layer_metric(name, product, by_layer)

    def add_combined_tags(
        self, values: Mapping[str, list[float]], kinds: Mapping[str, Callable[[list[float]], float]]
    ) -> None:
        """Add tags that combine the values of all layers.

        Args:
            values: values of all layers by tag. Each tag has at least one value.
            kinds: `WORST` or `SPREAD`.
        """
        self.values |= {f"{tag}/{kind}": of(found) for tag, found in values.items() for kind, of in kinds.items()}

    def add_uncast_tags(self, prefix: str, columns: Columns) -> None:
        """Add tags for tensors that the run does not quantize: the worst and the median value, as recorded and under each
        what-if recipe.
        """
        values = defaultdict[str, list[float]](list)
        names = ("role", "recipe", "scale_source", *_OF_UNCAST)
        rows = zip(*(columns[name] for name in names), strict=True) if columns else ()
        for role, recipe, source, *found in rows:
            under = f"/{recipe}" if source == "what-if" else ""
            for metric, value in zip(_OF_UNCAST, found, strict=True):
                if value is not None and math.isfinite(value):
                    values[f"{prefix}/{metric}/{role}{under}"].append(value)
        self.add_combined_tags(values, WORST)


def _on_axis(metric: str, values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the values by layer, converted for a linear axis if necessary."""
    if metric not in ON_LOG_AXES:
        return values
    found = {layer: ON_LOG_AXES[metric][1](value) for layer, value in values.items()}
    return {layer: value for layer, value in found.items() if value is not None}


#: metrics for which the summary contains the worst operand and the median of all operands
LOSSES = ("underflow_pct", "overflow_pct", "relative_error")
#: the metric of a wrong scale: difference in bits between the scale in use and the scale that fits the amax
OFF = "scale_ratio_log2"


@dataclass
class StepSummary:
    """The summary of one step.

    Attributes:
        scalars: finite values, by name.
        texts: strings by name: the worst tensors, and anything unusual.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class SampleSummarizer:
    """Summarizes samples one after the other. We keep the previous sample, because the early warning needs it."""

    def __init__(self) -> None:
        self._coverage: float | None = None
        self._samples = 0
        self._before: Sample | None = None

    def read_observed_share(self, fingerprint: Mapping[str, Any]) -> None:
        """Read from the fingerprint which share of the model is observed."""
        coverage = fingerprint.get("coverage")
        share = coverage.get("share_not_observed") if isinstance(coverage, Mapping) else None
        self._coverage = 100 * (1 - share) if isinstance(share, (int, float)) else None

    def summarize_sample(self, sample: Sample) -> StepSummary:
        """Summarize the next sample."""
        self._samples += 1
        found = StepSummary()
        _operands(sample, found)
        _nonfinite(sample, found)
        if self._samples > MADE_UP:
            score, key = score_early_warning(sample, self._before)
            if key is not None:
                found.scalars["early_warning"] = score
                found.texts["worst_tensor/early_warning"] = f"{SHOWN_AS[key[1]]} of {key[0]}"
            self._before = sample
        for module in load_feature_modules("scalars"):
            if hasattr(module, "add_summary"):
                module.add_summary(sample, found)
        if self._coverage is not None:
            found.scalars["coverage_pct"] = self._coverage
        if sample.describe_anomalies:
            found.texts["remarks"] = f"step {sample.step}: {sample.describe_anomalies}"
        return found


def _operands(sample: Sample, found: StepSummary) -> None:
    columns = sample.operand_columns
    known_of_run = classify_run_quantization(columns["scale_source"])
    for role in ROLES:
        rows = [i for i, r in enumerate(columns["role"]) if r == role and not is_expert_aggregate(columns["layer"][i])]
        for metric in (*LOSSES, OFF):
            values = [(columns[metric][i], i) for i in rows]
            known = [(value, i) for value, i in values if value is not None and math.isfinite(value)]
            if not known:
                continue
            worst, place = max(known, key=lambda of: abs(of[0]))
            found.scalars[f"{metric}/{role}/worst"] = worst
            found.scalars[f"{metric}/{role}/median"] = statistics.median(value for value, _ in known)
            mark = make_unquantized_note(columns["scale_source"][place], known_of_run)
            name = columns["layer"][place] + (f" ({mark})" if mark else "")
            found.texts[f"worst_tensor/{metric}/{role}"] = name if worst else "none: all are 0"


def _nonfinite(sample: Sample, found: StepSummary) -> None:
    of_layers = [not is_expert_aggregate(layer) for layer in sample.operand_columns["layer"]]
    for name in ("nan", "inf"):
        counts = zip(sample.operand_columns[name], of_layers, strict=True)
        found.scalars[f"{name}_count"] = sum(count or 0 for count, counted in counts if counted)


@dataclass(frozen=True)
class LayerMap:
    """A table of layers (rows) and roles (columns) at one step."""

    step: int
    header: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def from_sample(cls, sample: Sample) -> LayerMap:
        """Make a row for each layer, in the order of the sample. Make one row for all experts of a layer."""
        columns, at = sample.operand_columns, dict[tuple[str, str], int]()
        for i, key in enumerate(zip(columns["layer"], columns["role"], strict=True)):
            if find_expert_aggregate(key[0]) is None:
                at[key] = i
        shown = [(metric, role) for metric in LOSSES for role in ROLES]
        layers = dict.fromkeys(layer for layer, role in at if role in ROLES)
        rows = [
            [layer, *(columns[metric][at[layer, role]] if (layer, role) in at else None for metric, role in shown)]
            for layer in layers
        ]
        return cls(sample.step, ("layer", *(f"{SHOWN_AS[role]} {metric}" for metric, role in shown)), rows)

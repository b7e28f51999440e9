"""The few scalars of a step to begin with, whatever the size of the model, and which tensors they are of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.keys import ROLES, SHOWN_AS
from ..core.layer_names import aggregate_of, is_aggregate
from ..core.sample import Sample
from ..core.table import load_modules
from ..numerics.limits import MADE_UP
from ..options.trigger_rules import farthest_beyond

#: metrics of operands that have a worst tensor and a median
LOSSES = ("underflow_pct", "overflow_pct", "relative_error")
#: and by how many bits the scale in use is off what the amax asks for
OFF = "scale_ratio_log2"


@dataclass
class StartHere:
    """What is told of one step.

    Attributes:
        scalars: by name, all finite.
        texts: by name: which tensors the worst are, what is out of the ordinary.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class Overview:
    """Sums up sample after sample; knows the one before, as the early warning does."""

    def __init__(self) -> None:
        self._coverage: float | None = None
        self._samples = 0
        self._before: Sample | None = None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Take how much of the model is observed from a fingerprint."""
        coverage = fingerprint.get("coverage")
        share = coverage.get("share_not_observed") if isinstance(coverage, Mapping) else None
        self._coverage = 100 * (1 - share) if isinstance(share, (int, float)) else None

    def of(self, sample: Sample) -> StartHere:
        """Of the next sample."""
        self._samples += 1
        found = StartHere()
        _operands(sample, found)
        _nonfinite(sample, found)
        if self._samples > MADE_UP:
            score, key = farthest_beyond(sample, self._before)
            if key is not None:
                found.scalars["early_warning"] = score
                found.texts["worst_tensor/early_warning"] = f"{SHOWN_AS[key[1]]} of {key[0]}"
            self._before = sample
        for module in load_modules("scalars"):
            if hasattr(module, "add_summary"):
                module.add_summary(sample, found)
        if self._coverage is not None:
            found.scalars["coverage_pct"] = self._coverage
        if sample.remarks:
            found.texts["remarks"] = f"step {sample.step}: {sample.remarks}"
        return found


def _operands(sample: Sample, found: StartHere) -> None:
    columns = sample.columns
    for role in ROLES:
        rows = [i for i, r in enumerate(columns["role"]) if r == role and not is_aggregate(columns["layer"][i])]
        for metric in (*LOSSES, OFF):
            values = [(columns[metric][i], columns["layer"][i]) for i in rows]
            known = [(value, layer) for value, layer in values if value is not None and math.isfinite(value)]
            if not known:
                continue
            worst, layer = max(known, key=lambda of: abs(of[0]))
            found.scalars[f"{metric}/{role}/worst"] = worst
            found.scalars[f"{metric}/{role}/median"] = statistics.median(value for value, _ in known)
            found.texts[f"worst_tensor/{metric}/{role}"] = layer if worst else "none: all are 0"


def _nonfinite(sample: Sample, found: StartHere) -> None:
    of_layers = [not is_aggregate(layer) for layer in sample.columns["layer"]]
    for name in ("nan", "inf"):
        counts = zip(sample.columns[name], of_layers, strict=True)
        found.scalars[f"{name}_count"] = sum(count or 0 for count, counted in counts if counted)


@dataclass(frozen=True)
class LayerMap:
    """Layers by roles at one step: what a table shows."""

    step: int
    header: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, sample: Sample) -> LayerMap:
        """A row a layer, in the order of the sample; of experts their aggregate."""
        columns, at = sample.columns, dict[tuple[str, str], int]()
        for i, key in enumerate(zip(columns["layer"], columns["role"], strict=True)):
            if aggregate_of(key[0]) is None:
                at[key] = i
        shown = [(metric, role) for metric in LOSSES for role in ROLES]
        layers = dict.fromkeys(layer for layer, role in at if role in ROLES)
        rows = [
            [layer, *(columns[metric][at[layer, role]] if (layer, role) in at else None for metric, role in shown)]
            for layer in layers
        ]
        return cls(sample.step, ("layer", *(f"{SHOWN_AS[role]} {metric}" for metric, role in shown)), rows)

"""What the browser has to know beside the metrics themselves: how they are called, drawn and judged."""

from __future__ import annotations

from typing import Any

from ...core.keys import SHOWN_AS
from ...numerics.metric_names import LABELS, METRICS, UNITS, WORSE
from ...record import schema
from ...record.schema import SCHEMAS
from .layouts import NONFINITE

ROLES = dict(SHOWN_AS)
#: tables of tensors, and those of their histograms
TABLES = {table.name: table.histograms for table in schema.TABLES.values() if table.roles}

#: metrics that can be asked for: every number of a row but those that say which row it is
NUMBERS = (
    *dict.fromkeys(
        name
        for table in TABLES
        for name, kind in SCHEMAS[table].items()
        if kind.is_numeric() and name not in ("attempt", "step")
    ),
    NONFINITE,
)

#: scales of the colors that are not linear
_SCALES = {
    **dict.fromkeys(("mse", "relative_error", "amax", "amin", "kurtosis"), "log"),
    "scale_ratio_log2": "diverging",
}

#: float formats as `numerics.formats` has them, for a process that does not import torch
FORMATS: dict[str, dict[str, float]] = {
    "e4m3": {"max": 448.0, "min_normal": 2.0**-6, "min_subnormal": 2.0**-9, "bits": 8},
    "e5m2": {"max": 57344.0, "min_normal": 2.0**-14, "min_subnormal": 2.0**-16, "bits": 8},
    "e2m1": {"max": 6.0, "min_normal": 1.0, "min_subnormal": 0.5, "bits": 4},
    "bf16": {"max": (2 - 2.0**-7) * 2.0**127, "min_normal": 2.0**-126, "min_subnormal": 2.0**-133, "bits": 16},
    "fp16": {"max": 65504.0, "min_normal": 2.0**-14, "min_subnormal": 2.0**-24, "bits": 16},
}


def metrics_of() -> list[dict[str, Any]]:
    """The metrics that are offered, in the order of the record: name, label, unit, worse, scale, and table if only one has
    it."""
    offered = [_about(name, name) for name in METRICS]
    offered += [_about(f"unscaled_{name}", name, ", in the units of the loss") for name in UNITS]
    scale = {"name": "scale", "label": "scale in use", "unit": "", "worse": 1, "scale": "log"}
    nonfinite = {"name": NONFINITE, "label": "NaN and infinities", "unit": "values", "worse": 1, "scale": "linear"}
    own = [
        {"name": name, "label": m.label, "unit": m.unit, "worse": m.worse, "scale": m.scale, "table": table}
        for table in TABLES
        for name, m in schema.TABLES[table].metrics.items()
    ]
    return [*offered, scale, nonfinite, *own]


def worse_of(metric: str) -> int | None:
    """1: more is worse; -1: less is; None: what is farther from 0 is.

    Example:
        >>> worse_of("underflow_pct"), worse_of("cosine"), worse_of("scale_ratio_log2")
        (1, -1, None)
    """
    return _WORSE.get(metric, 1)


def table_of(role: str) -> str:
    """The table that has tensors of a role.

    Example:
        >>> table_of("input"), table_of("first_moment")
        ('metrics', 'states')
    """
    return next((table for table in TABLES if role in schema.TABLES[table].roles), next(iter(TABLES)))


def _about(name: str, like: str, more: str = "") -> dict[str, Any]:
    return _described(name, like, WORSE[like], more)


def _described(name: str, like: str, worse: int, more: str = "") -> dict[str, Any]:
    label, unit = LABELS[like]
    return {"name": name, "label": label + more, "unit": unit, "worse": worse, "scale": _SCALES.get(like, "linear")}


_WORSE = {about["name"]: None if about["scale"] == "diverging" else about["worse"] for about in metrics_of()}

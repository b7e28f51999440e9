"""The names of metrics, in a module that does not import torch."""

from __future__ import annotations

from functools import cache

from ..core.table import load_feature_modules

#: metrics in the order of the record's columns, with 1 if larger values are worse, and -1 if larger values are better
WORSE = {
    "underflow_pct": 1,
    "overflow_pct": 1,
    "mse": 1,
    "relative_error": 1,
    "sqnr_db": -1,
    "cosine": -1,
    "scale_ratio_log2": 1,
    "amax": 1,
    "amin": -1,
    "dynamic_range_log2": 1,
    "outlier_log2": 1,
    "kurtosis": 1,
}
METRICS = tuple(WORSE)
#: label and unit of each metric
LABELS = {
    "underflow_pct": ("underflow", "%"),
    "overflow_pct": ("overflow", "%"),
    "mse": ("mean squared error", ""),
    "relative_error": ("relative error", ""),
    "sqnr_db": ("signal to quantization noise", "dB"),
    "cosine": ("cosine", ""),
    "scale_ratio_log2": ("scale in use / current scale", "log2"),
    "amax": ("largest magnitude", ""),
    "amin": ("smallest magnitude", ""),
    "dynamic_range_log2": ("largest / smallest magnitude", "log2"),
    "outlier_log2": ("largest / median magnitude", "log2"),
    "kurtosis": ("kurtosis", ""),
    "nonfinite": ("NaN and infinities", ""),
}

#: metrics that scale with a power of the values, and that power
UNITS = {"amax": 1, "amin": 1, "mse": 2}

#: statistics of the scales of an operand's blocks
BLOCK_SCALES = ("blocks", "empty_blocks", "scale_min", "scale_median", "scale_max", "at_smallest_pct", "at_largest_pct")


@cache
def _labels_of_features() -> dict[str, tuple[str, str]]:
    """Return labels and units of metrics that only one table has."""
    tables = [table for module in load_feature_modules("table") for table in module.TABLES]
    return {name: (metric.label, metric.unit) for table in tables for name, metric in table.metrics.items()}


def label_metric(metric: str) -> str:
    """Return the label of a metric, with its unit.

    Example:
        >>> label_metric("underflow_pct"), label_metric("mse"), label_metric("something_new")
        ('underflow (%)', 'mean squared error', 'something new')
    """
    label, unit = (LABELS | _labels_of_features()).get(metric, (metric.replace("_", " "), ""))
    return f"{label} ({unit})" if unit else label

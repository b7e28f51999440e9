"""Tables of operands: metrics in use and under other recipes, histograms, copies, and scales of blocks."""

from __future__ import annotations

from ...core.keys import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES
from ...core.table import SAMPLE, Table, declare_columns
from ...numerics.metric_names import BLOCK_SCALES, METRICS, UNITS

#: columns of every table of tensors: keys of the row, and metrics
TENSORS: dict[str, str] = {
    **SAMPLE,
    **declare_columns("float64", "consumed_samples"),
    **declare_columns("string", "layer", "gemm", "role", "recipe", "format", "dtype", "scale_source"),
    **declare_columns("int64", "calls", "ranks", "ranks_missing", "experts", "n", "nan", "inf", "nonfinite_order"),
    **declare_columns("float64", "scale", "scale_current", *METRICS),
    **declare_columns("float64", *(f"unscaled_{name}" for name in UNITS)),
}
#: columns of a histogram: its occupied bins, ascending, and the count of each bin
HISTOGRAMS: dict[str, str] = {
    **SAMPLE,
    **declare_columns("string", "layer", "role", "recipe", "format", "dtype"),
    **declare_columns("boolean", "rounded"),
    **declare_columns("float64", "scale"),
    "bins": "list[uint16]",
    "counts": "list[int64]",
}
_BLOCK_SCALES: dict[str, str] = {
    **{name: kind for name, kind in TENSORS.items() if name in (*SAMPLE, "consumed_samples", "layer", "gemm", "role")},
    **declare_columns("string", "recipe", "format", "dtype", "scale_source"),
    **declare_columns("int64", "calls", "ranks", "ranks_missing", "experts"),
    **declare_columns("float64", *BLOCK_SCALES),
    **declare_columns("int64", "blocks", "empty_blocks"),
}

METRICS_TABLE = Table("metrics", TENSORS, roles=(*ROLES, *ATTENTION_FORWARD, *ATTENTION_BACKWARD), histograms="histograms")
TABLES = (
    METRICS_TABLE,
    Table("what_if", TENSORS),
    #: the column `rounded` is true for approximate metrics, from histograms of float32 values rounded to bfloat16
    Table("replayed", {**TENSORS, **declare_columns("boolean", "rounded")}, is_added_later=True),
    Table("histograms", HISTOGRAMS, by_step=True),
    Table("copies", {**TENSORS, "product": "string"}),
    Table("block_scales", _BLOCK_SCALES),
)

"""The tables of a run record, and how its parts are named. Columns: docs/record.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ..numerics.metric_names import (
    ACTIVATION_METRICS,
    BLOCK_SCALES,
    METRICS,
    OUTPUT_METRICS,
    STATE_METRICS,
    UNITS,
    UPDATE_METRICS,
)

#: file of a record: what the run made of its control file, how far dumps are, and whether it has ended
STATUS = "status.json"
VERSION = 4
#: of a fingerprint, each a mapping
SECTIONS = (
    *("versions", "devices", "environment", "recipe", "torchao", "backend_options", "risky_features_on", "model"),
    *("sampled", "coverage", "imported"),
)

#: of dY, in the units of the loss
_UNSCALED = tuple(f"unscaled_{name}" for name in UNITS)

_KEYS = {"attempt": pl.Int32, "step": pl.Int64}
_METRICS: dict[str, Any] = {
    **_KEYS,
    "consumed_samples": pl.Float64,
    "layer": pl.String,
    "gemm": pl.String,
    "role": pl.String,
    "recipe": pl.String,
    "format": pl.String,
    "dtype": pl.String,
    "scale_source": pl.String,
    "calls": pl.Int64,
    "ranks": pl.Int64,
    "ranks_missing": pl.Int64,
    "experts": pl.Int64,
    "n": pl.Int64,
    "nan": pl.Int64,
    "inf": pl.Int64,
    "nonfinite_order": pl.Int64,
    "scale": pl.Float64,
    "scale_current": pl.Float64,
    **dict.fromkeys(METRICS, pl.Float64),
    **dict.fromkeys(_UNSCALED, pl.Float64),
}
#: one row for each operand and scale: its occupied bins, ascending, and how many values each counts
_HISTOGRAMS: dict[str, Any] = {
    **_KEYS,
    "layer": pl.String,
    "role": pl.String,
    "recipe": pl.String,
    "format": pl.String,
    "dtype": pl.String,
    "rounded": pl.Boolean,
    "scale": pl.Float64,
    "bins": pl.List(pl.UInt16),
    "counts": pl.List(pl.Int64),
}
#: one row for each product of a GEMM, where that was asked for
_OUTPUTS: dict[str, Any] = {
    **_KEYS,
    "consumed_samples": pl.Float64,
    "layer": pl.String,
    "gemm": pl.String,
    "product": pl.String,
    "recipe": pl.String,
    "scale_source": pl.String,
    "ranks": pl.Int64,
    "experts": pl.Int64,
    "n": pl.Int64,
    **dict.fromkeys(OUTPUT_METRICS, pl.Float64),
}
#: one row for each product of a GEMM, where that was asked for
_VERIFICATION: dict[str, Any] = {
    **{name: _OUTPUTS[name] for name in (*_KEYS, "consumed_samples", "layer", "gemm", "product")},
    **dict.fromkeys(("outcome", "reason", "shape"), pl.String),
    **dict.fromkeys(("rank", "ranks", "ranks_beyond", "ranks_unknown", "values"), pl.Int64),
    **dict.fromkeys(("error_over_bound", "factor", "relative_error"), pl.Float64),
    **dict.fromkeys(("row", "column", "values_beyond", "rows_beyond", "columns_beyond"), pl.Int64),
}
#: one row for each tensor that ranks may hold copies of, where that was asked for
_REPLICAS: dict[str, Any] = {
    **{name: _OUTPUTS[name] for name in (*_KEYS, "consumed_samples", "layer", "gemm")},
    **dict.fromkeys(("what", "outcome"), pl.String),
    **dict.fromkeys(("ranks", "ranks_apart", "rank"), pl.Int64),
}
#: one row for each operand that is cast in blocks, where that was asked for
_BLOCK_SCALES: dict[str, Any] = {
    **{name: _METRICS[name] for name in (*_KEYS, "consumed_samples", "layer", "gemm", "role", "recipe", "format", "dtype")},
    **{name: _METRICS[name] for name in ("scale_source", "calls", "ranks", "ranks_missing", "experts")},
    **dict.fromkeys(BLOCK_SCALES, pl.Float64),
    "blocks": pl.Int64,
    "empty_blocks": pl.Int64,
}
#: numbers of every step that a host may report
STEP_SCALARS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "grad_scale")
#: every step; what is read on sampled steps only is null on others
_STEPS: dict[str, Any] = {**_KEYS, "time": pl.Float64, **dict.fromkeys(STEP_SCALARS, pl.Float64), "trigger": pl.String}

#: one row for each evaluation and each loss that it reports
_VALIDATION: dict[str, Any] = {**_KEYS, "time": pl.Float64, "name": pl.String, "loss": pl.Float64}

#: `what_if` and `replayed` have metrics under recipes that were not in use, measured in the run or added to its record later
SCHEMAS: dict[str, dict[str, Any]] = {
    "metrics": _METRICS,
    "what_if": _METRICS,
    "replayed": _METRICS,
    "histograms": _HISTOGRAMS,
    "outputs": _OUTPUTS,
    "copies": {**_METRICS, "product": pl.String},
    "block_scales": _BLOCK_SCALES,
    "verification": _VERIFICATION,
    "replicas": _REPLICAS,
    "states": {**_METRICS, **dict.fromkeys((*STATE_METRICS, *UPDATE_METRICS), pl.Float64)},
    "state_histograms": _HISTOGRAMS,
    "activations": {**_METRICS, **dict.fromkeys(ACTIVATION_METRICS, pl.Float64), "loads": pl.List(pl.Int64)},
    "activation_histograms": _HISTOGRAMS,
    "steps": _STEPS,
    "validation": _VALIDATION,
}

_ARROW_TYPES = {
    pl.Boolean: pa.bool_(),
    pl.UInt16: pa.uint16(),
    pl.Int32: pa.int32(),
    pl.Int64: pa.int64(),
    pl.Float64: pa.float64(),
    pl.String: pa.string(),
}


def arrow_table(table: str, columns: Mapping[str, Any]) -> pa.Table:
    """Columns as the schema of `table` has them; null where they are not given, and names that it lacks left out."""
    rows = len(next(iter(columns.values())))
    schema = arrow_schema(table)
    return pa.table([_array(columns.get(field.name), field.type, rows) for field in schema], schema=schema)


def _array(values: Sequence[Any] | None, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    # Of a list of arrays pyarrow makes one value after the other, and loads pandas to do it.
    absent, arrays = [array is None for array in values], [() if array is None else array for array in values]
    ends, dtype = np.cumsum([0, *map(len, arrays)], dtype=np.int32), kind.value_type.to_pandas_dtype()
    flat = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
    mask = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), kind, mask=mask)


def arrow_schema(table: str, columns: Iterable[str] | None = None) -> pa.Schema:
    """The schema of `table`, or of some of its columns, as parts have it."""
    kept = None if columns is None else set(columns)
    return pa.schema([(c, _arrow_type(kind)) for c, kind in SCHEMAS[table].items() if kept is None or c in kept])


def texts_of(schema: pa.Schema) -> list[str]:
    """Names of columns of text."""
    return [field.name for field in schema if field.type == pa.string()]


def _arrow_type(kind: Any) -> pa.DataType:
    if isinstance(kind, pl.List):
        return pa.list_(_arrow_type(kind.inner))
    return _ARROW_TYPES[kind]


# No more digits than the columns hold.
_PART = re.compile(r"attempt-(\d{1,9})-steps?-(\d{1,18})(?:-(\d{1,18}))?-([0-9a-f]{8})\.parquet")
_FINGERPRINT = re.compile(r"attempt-(\d{1,9})\.json")


@dataclass(frozen=True)
class Part:
    """What the name of a part says."""

    folder: str
    name: str
    attempt: int
    first: int
    last: int
    checksum: str
    #: made of several parts, which it replaces
    merged: bool

    @property
    def path(self) -> str:
        """Below the record's folder."""
        return f"{self.folder}/{self.name}"

    @classmethod
    def named(cls, folder: str, name: str) -> Part | None:
        """The part called `name` in a folder of the record; None if that is not the name of a part."""
        found = _PART.fullmatch(name)
        if not found:
            return None
        attempt, first, last, checksum = found.groups()
        return cls(folder, name, int(attempt), int(first), int(last or first), checksum, last is not None)


def part_name(attempt: int, first: int, last: int | None, checksum: str) -> str:
    """The name of a part of one step, or of a merged one where `last` is given."""
    steps = f"step-{first:08d}" if last is None else f"steps-{first:08d}-{last:08d}"
    return f"attempt-{attempt}-{steps}-{checksum}.parquet"


def attempt_of_fingerprint(name: str) -> int | None:
    """The attempt that the fingerprint called `name` belongs to; None where that is no name of one."""
    found = _FINGERPRINT.fullmatch(name)
    return int(found[1]) if found else None

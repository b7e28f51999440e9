"""Records of the benchmark's runs: a file a part, a row a run, of which any comes back as the analysis reads one.

    from fault_injection.records import read_run, truths
    for told in truths("tune"):
        run = read_run(told, interval=20)

A run is a row group, its tables are lists. What follows from other columns is not stored (see `_derived`). Metrics are
float32 of which 14 bits behind the point are kept, one in 30,000.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from fault_injection.sets import is_tune
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.record.schema import SCHEMAS

FOLDER = Path(__file__).parent / "records"
_TEXT = ("layer", "gemm", "role", "recipe", "format", "dtype", "scale_source")
_COUNTS = ("step", "calls", "experts", "n", "nan", "inf", "nonfinite_order")
_FLOATS = (
    *("scale", "scale_ratio_log2", "underflow_pct", "overflow_pct", "mse", "relative_error", "cosine"),
    *("amax", "amin", "outlier_log2", "kurtosis"),
)
_OF_STEPS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "grad_scale")
#: bits of a float32's 23 that are rounded away
_ROUNDED = 9


@dataclass(frozen=True)
class Recorded:
    """A run as it was trained."""

    truth: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    metrics: pl.DataFrame
    steps: pl.DataFrame


def write_part(path: Path, runs: Sequence[Recorded]) -> None:
    """Write the file of a part, whole or not at all."""
    columns: dict[str, pa.Array] = {
        "truth": pa.array([json.dumps(run.truth) for run in runs]),
        "fingerprint": pa.array([json.dumps(run.fingerprint, default=str) for run in runs]),
    }
    tables = [_by_tensor(run.metrics) for run in runs]
    for name in (*_TEXT, *_COUNTS, *_FLOATS):
        columns[f"metrics_{name}"] = _lists([table[name] for table in tables])
    for name in ("step", *_OF_STEPS):
        columns[f"steps_{name}"] = _lists([run.steps[name].cast(pl.Int32 if name == "step" else pl.Float32) for run in runs])
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    floats = [f"metrics_{name}.list.element" for name in _FLOATS] + [f"steps_{name}.list.element" for name in _OF_STEPS]
    texts = [f"metrics_{name}.list.element" for name in (*_TEXT, *_COUNTS)]
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(
        table,
        unfinished,
        row_group_size=1,
        compression="zstd",
        compression_level=15,
        use_dictionary=texts,
        use_byte_stream_split=floats,
        write_statistics=False,
    )
    unfinished.rename(path)


def _by_tensor(metrics: pl.DataFrame) -> pl.DataFrame:
    """Rows of a tensor together, tensors in the order in which they first come."""
    first = pl.int_range(pl.len()).first().over("layer", "role")
    floats = [_rounded(metrics[name]).alias(name) for name in _FLOATS]
    return metrics.with_columns(*floats, _first=first).sort("_first", "step").with_columns(pl.col(*_COUNTS).cast(pl.Int32))


def _rounded(values: pl.Series) -> pl.Series:
    bits = values.cast(pl.Float32).fill_null(np.nan).to_numpy().view(np.uint32)
    half, kept = np.uint32(1 << (_ROUNDED - 1)), np.uint32(0xFFFFFFFF << _ROUNDED & 0xFFFFFFFF)
    finite = (bits >> 23 & 0xFF) != 0xFF
    rounded = pl.Series(np.where(finite, (bits + half) & kept, bits).view(np.float32))
    return rounded.set(values.is_null(), None) if values.null_count() else rounded


def _lists(columns: Sequence[pl.Series]) -> pa.Array:
    ends = np.cumsum([0, *map(len, columns)], dtype=np.int32)
    return pa.ListArray.from_arrays(
        pa.array(ends), pl.concat(columns).rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    )


@lru_cache(None)
def _truths_in(path: Path, written: int) -> list[str]:
    """Of each row of a file, as text; read once unless it is written anew."""
    texts: list[str] = pq.ParquetFile(path).read(columns=["truth"])["truth"].to_pylist()
    return texts


def truths(which: str, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """What is true of each run of a set, with the file and row that it lies in.

    Args:
        which: `tune` (see `sets.is_tune`) or `all`.
    """
    for path in sorted(folder.glob("*.parquet")):
        family, _, part = path.stem.rpartition("-")
        for row, text in enumerate(_truths_in(path, path.stat().st_mtime_ns)):
            told = json.loads(text)
            if which == "all" or is_tune(family, int(part), told["kind"]):
                yield told | {"path": str(path), "row": row, "part": path.stem}


@dataclass(frozen=True)
class StoredRun(Run):
    """A run without a record of its own."""

    table_of_steps: pl.DataFrame = field(default_factory=pl.DataFrame)

    @property
    def steps(self) -> pl.DataFrame:  # type: ignore[override]
        return self.table_of_steps

    def read_table(self, name: str) -> pl.DataFrame:
        """Return no rows: of tables, those of operands and of steps alone are stored."""
        return pl.DataFrame(schema=SCHEMAS[name])

    @property
    def unused_recipe_metrics(self) -> pl.DataFrame:  # type: ignore[override]
        return pl.DataFrame(schema=SCHEMAS["what_if"])

    def until(self, step: int) -> StoredRun:
        """What it was before a step."""
        steps = self.table_of_steps.filter(pl.col("step") < step)
        metrics = self.metrics.select_steps(self.metrics.steps[self.metrics.steps < step])
        return replace(self, metrics=metrics, loss=LossCurve.from_steps_table(steps), table_of_steps=steps)


def read_run(told: Mapping[str, Any], interval: int = 5) -> StoredRun:
    """A run as the analysis takes it.

    Args:
        told: of `truths`.
        interval: of its samples, a multiple of 5.
    """
    row = pq.ParquetFile(told["path"]).read_row_group(told["row"])
    metrics = _table(row, "metrics_").filter(pl.col("step") % interval == 0)
    steps = _table(row, "steps_")
    sampled = pl.col("step") % interval == 0
    steps = steps.with_columns(pl.when(sampled).then("grad_scale"), attempt=pl.lit(0)).select(_all("steps", steps))
    metrics = _derived(metrics, steps).sort("step", maintain_order=True)
    fingerprint = json.loads(row["fingerprint"][0].as_py())
    fingerprint["sampled"] = fingerprint.get("sampled", {}) | {"interval": interval}
    name = f"{told['part']}/{told['name']}"
    return StoredRun(
        path=name,
        fingerprint=fingerprint,
        metrics=MetricsTable.from_rows(metrics),
        loss=LossCurve.from_steps_table(steps),
        table_of_steps=steps,
    )


def read_losses(told: Mapping[str, Any]) -> dict[int, float | None]:
    """Return the losses of a run by step, as they lie in its file."""
    row = pq.ParquetFile(told["path"]).read_row_group(told["row"], columns=["steps_step", "steps_loss"])
    return dict(_table(row, "steps_").select("step", "loss").rows())


def _table(row: pa.Table, prefix: str) -> pl.DataFrame:
    names = [name for name in row.column_names if name.startswith(prefix)]
    return pl.DataFrame({name.removeprefix(prefix): pl.from_arrow(row[name].combine_chunks().flatten()) for name in names})


def _all(table: str, have: pl.DataFrame) -> list[pl.Expr]:
    """The columns of a record's table, null where they are missing."""
    return [
        (pl.col(name).cast(kind) if name in (*have.columns, "attempt") else pl.lit(None, kind)).alias(name)
        for name, kind in SCHEMAS[table].items()
    ]


def _derived(metrics: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """With the columns that follow from others."""
    rows = metrics.join(steps.select("step", "consumed_samples", "grad_scale"), on="step", how="left", maintain_order="left")
    scale = pl.when((pl.col("role") == "grad_output") & pl.col("grad_scale").is_not_null()).then(pl.col("grad_scale").abs())
    rows = rows.with_columns(
        attempt=pl.lit(0),
        ranks=pl.coalesce("experts", pl.lit(1)),  # of one process
        ranks_missing=pl.lit(0),
        scale_current=pl.col("scale").cast(pl.Float64) / 2.0 ** pl.col("scale_ratio_log2").cast(pl.Float64),
        sqnr_db=-20 * pl.col("relative_error").cast(pl.Float64).log10(),
        dynamic_range_log2=(pl.col("amax").cast(pl.Float64) / pl.col("amin")).log(2),
        unscaled_amax=pl.col("amax") / scale,
        unscaled_amin=pl.col("amin") / scale,
        unscaled_mse=pl.col("mse") / scale**2,
    )
    return rows.select(_all("metrics", rows))

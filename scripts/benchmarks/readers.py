"""Compare DuckDB and polars with our own reader of records: time, peak memory, and results.

Neither can replace our reader. Both read a damaged part without an error, and their sums differ in the last bits. For
medians of 134 million rows, polars takes 23 GB, and DuckDB fails with a memory limit of 2.5 GB. So `record/parts.py` uses
our own code.

    .venv/bin/python scripts/benchmarks/readers.py RUN [--output FILE] [--s3]

RUN is a record of `large_records.py --keep`. Each query runs in a new process. The engines get the list of parts
that count from our reader, so they need not decide which rows of a record count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.record.storage import FolderStorage

SUMS = ("underflow_pct", "relative_error", "amax")
COLUMNS = ("scale", "underflow_pct", "cosine")
KEY = ["layer", "role"]
#: pattern (SQL's LIKE) for the layers of the operands whose columns are read
SOME = "model.layers.29.mlp.experts.1%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are appended")
    parser.add_argument("--s3", action="store_true", help="copy the record to a local S3 server, and read it from there")
    parser.add_argument("--damage", action="store_true", help="flip one bit in a column of a copy of the record")
    parser.add_argument("--one", nargs=2, help="engine and query, to run in this process")
    options = parser.parse_args()
    if options.one:
        engine, query = options.one
        print(json.dumps(digest_of(ENGINES[engine][query](options.run))))
        return
    if options.s3:
        sys.path.insert(0, str(Path(__file__).parents[1] / "validation"))
        from s3_proxy import new_address, s3

        with s3():
            address = new_address()
            for path in filter(Path.is_file, Path(options.run).rglob("*")):
                FolderStorage(address).replace_file(str(path.relative_to(options.run)), path.read_bytes())
            found = measure(address, "S3")
    elif options.damage:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(shutil.copytree(options.run, Path(folder) / "run"))
            damage(run)
            found = measure(str(run), "a damaged part")
    else:
        found = measure(options.run, "local")
    if options.output:
        before = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text("[\n" + ",\n".join(json.dumps(each) for each in [*before, found]) + "\n]\n")


def damage(run: Path) -> None:
    """Flip a bit in the values of a column, which Parquet itself does not protect with a checksum."""
    import pyarrow.parquet as pq

    path = sorted((run / "metrics").iterdir())[0]
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = next(c for i in range(group.num_columns) if (c := group.column(i)).path_in_schema == SUMS[1])
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


def measure(run: str, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {"record": what, "rows": rows_in(run)}
    for query in QUERIES:
        expected = None
        for engine in ENGINES:
            seconds, memory, out = run_alone(run, engine, query)
            expected = out if engine == "ours" else expected
            differ = "failed" if out is None else [name for name in out if out[name] != expected[name]]
            found[f"{query}: {engine}"] = {"seconds": round(seconds, 1), "gb": round(memory, 2), "differ": differ}
            print(f"{query}: {engine}: {seconds:.1f} s, {memory:.2f} GB, columns that differ: {differ}", flush=True)
    return found


def rows_in(run: str) -> int:
    from nemo_fp8_debug.record.parts import count_table_rows

    return count_table_rows(run, "metrics")


def run_alone(run: str, engine: str, query: str) -> tuple[float, float, Any]:
    """Run a query in a new process. Return seconds, peak memory in GB, and the digest of the result (None if it failed)."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as sink:
        command = [sys.executable, "-W", "ignore", __file__, run, "--one", engine, query]
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        sink.seek(0)
        out = sink.read()
    return seconds, used.ru_maxrss / 1e6, json.loads(out) if os.waitstatus_to_exitcode(status) == 0 else None


def digest_of(found: pl.DataFrame) -> dict[str, str]:
    """Return a hash of each column, to see which columns differ."""
    return {
        name: hashlib.sha256(found[name].to_numpy().tobytes()).hexdigest()[:12] for name in found.columns if name not in KEY
    }


def parts(run: str) -> list[str]:
    """Return the addresses of all parts with rows that count."""
    metrics = MetricsTable.read(FolderStorage(run), held=0)
    storage = FolderStorage(run)
    return [f"{storage}/{part.path}" for part, _ in metrics._source._parts]  # type: ignore[attr-defined]


# Ours


def ours_extremes(run: str) -> pl.DataFrame:
    metrics = MetricsTable.read(FolderStorage(run), held=0)
    shape = len(SUMS), len(metrics.tensors)
    sums, lows, highs = np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf)
    for chunk in metrics.read_chunks(SUMS):
        values = chunk.rows.select(SUMS).to_numpy().T
        for _, here, operands in chunk.split_by_step():
            sums[:, operands] += values[:, here]
            lows[:, operands] = np.minimum(lows[:, operands], values[:, here])
            highs[:, operands] = np.maximum(highs[:, operands], values[:, here])
    of = {"sum": sums, "min": lows, "max": highs}
    return metrics.tensors.with_columns(
        pl.Series(f"{kind} {name}", values[i]) for kind, values in of.items() for i, name in enumerate(SUMS)
    ).sort(KEY)


def ours_columns(run: str) -> pl.DataFrame:
    metrics = MetricsTable.read(FolderStorage(run), held=0)
    prefix = SOME.rstrip("%")
    some = metrics.tensors.filter(pl.col("layer").str.starts_with(prefix))
    return metrics.select_tensors(some).read_all_rows(COLUMNS).sort("step", *KEY)


def ours_medians(run: str) -> pl.DataFrame:
    from nemo_fp8_debug.analysis.runs.blocks import map_tensor_chunks

    metrics = MetricsTable.read(FolderStorage(run), held=0)
    medians = np.concatenate(map_tensor_chunks(lambda grid: np.median(grid.read_metric("relative_error"), axis=1), metrics))
    return metrics.tensors.with_columns(median=medians).sort(KEY)


# polars


def scanned(run: str) -> pl.LazyFrame:
    options = {}
    if run.startswith("s3://"):
        options = {
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
            "aws_endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }
    return pl.scan_parquet(parts(run), storage_options=options or None)


def polars_extremes(run: str) -> pl.DataFrame:
    found = [getattr(pl.col(name), kind)().alias(f"{kind} {name}") for kind in ("sum", "min", "max") for name in SUMS]
    return scanned(run).group_by(KEY).agg(found).sort(KEY).collect(engine="streaming")


def polars_columns(run: str) -> pl.DataFrame:
    rows = scanned(run).filter(pl.col("layer").str.starts_with(SOME.rstrip("%")))
    return rows.select("step", *KEY, *COLUMNS).sort("step", *KEY).collect(engine="streaming")


def polars_medians(run: str) -> pl.DataFrame:
    found = scanned(run).group_by(KEY).agg(median=pl.median("relative_error")).sort(KEY)
    return found.collect(engine="streaming")


# DuckDB


def lake(run: str) -> Any:
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET memory_limit = '2500MB'; SET preserve_insertion_order = false")
    if run.startswith("s3://"):
        import fsspec

        connection.register_filesystem(fsspec.filesystem("s3"))  # otherwise, DuckDB downloads its own S3 extension
    return connection


def ask(run: str, select: str, rest: str) -> pl.DataFrame:
    files = ", ".join(f"'{path}'" for path in parts(run))
    found: pl.DataFrame = lake(run).sql(f"SELECT {select} FROM read_parquet([{files}]) {rest}").pl()
    return found


def duckdb_extremes(run: str) -> pl.DataFrame:
    found = ", ".join(f'{kind}({name}) AS "{kind} {name}"' for kind in ("sum", "min", "max") for name in SUMS)
    return ask(run, f"layer, role, {found}", "GROUP BY layer, role ORDER BY layer, role")


def duckdb_columns(run: str) -> pl.DataFrame:
    names = ", ".join(("step", *KEY, *COLUMNS))
    return ask(run, names, f"WHERE layer LIKE '{SOME}' ORDER BY step, layer, role")


def duckdb_medians(run: str) -> pl.DataFrame:
    return ask(run, "layer, role, median(relative_error) AS median", "GROUP BY layer, role ORDER BY layer, role")


QUERIES = ("extremes", "columns", "medians")
ENGINES: dict[str, dict[str, Callable[[str], pl.DataFrame]]] = {
    "ours": {"extremes": ours_extremes, "columns": ours_columns, "medians": ours_medians},
    "polars": {"extremes": polars_extremes, "columns": polars_columns, "medians": polars_medians},
    "duckdb": {"extremes": duckdb_extremes, "columns": duckdb_columns, "medians": duckdb_medians},
}

if __name__ == "__main__":
    main()

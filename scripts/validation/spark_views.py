"""Compares the views of `nemo-fp8-debug sql --engine spark` with `read_record`, in Spark's local mode, row by row.

    python3.11 -m venv /tmp/spark && /tmp/spark/bin/pip install pyspark==4.3.0     # 450 MB; needs Java 17
    .venv/bin/python scripts/validation/spark_views.py --spark /tmp/spark/bin/python

Records of both earlier schemas, one of three overlapping attempts with what killed merges leave and recipes replayed twice,
the same in a folder with an odd name, and one whose run is resumed under today's schema. Writes spark_views.json, with the
checksum of the statements that were run: a test holds it against those of today.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

from nemo_fp8_debug import Monitor, read_record, replay
from nemo_fp8_debug.analysis.replay.replay import write_replayed_rows
from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.record.views import sql_views

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_suffix(".json")
OLD = ROOT / "tests" / "record" / "old"
#: what runs in the environment of Spark: statements and tables of each record on standard input, Parquet of each table out
IN_SPARK = """
import json, sys
from pyspark.sql import SparkSession
import pyspark
settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
for job in json.load(sys.stdin):
    for statement in job["statements"]:
        spark.sql(statement)
    for table in job["tables"]:
        spark.sql(f"SELECT * FROM {table}").coalesce(1).write.parquet(f"{job['output']}/{table}")
print("version", pyspark.__version__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spark", required=True, help="the Python of an environment that has pyspark")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = records(Path(folder))
        jobs = [job(name, run, Path(folder) / "out" / str(i)) for i, (name, run) in enumerate(runs.items())]
        done = subprocess.run(
            [options.spark, "-c", IN_SPARK], input=json.dumps(jobs), text=True, stdout=subprocess.PIPE, check=True
        )
        found = {name: compared(run, Path(one["output"])) for (name, run), one in zip(runs.items(), jobs, strict=True)}
    version = done.stdout.split("version ")[1].strip()
    content = {"pyspark": version, "statements": checksum(), "rows_equal": found}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(content, indent=2))


def checksum() -> int:
    """Return that of all statements about a record with parts of earlier and today's schemas, in any order of tables."""
    run = OLD / "schema_3" / "bad"
    statements = sql_views(run, "spark").replace(str(run), "RUN").split(";\n")
    return zlib.crc32("\n".join(sorted(statements)).encode())


def records(folder: Path) -> dict[str, Path]:
    runs = {"schema 2": OLD / "schema_2" / "bad", "schema 3": OLD / "schema_3" / "bad"}
    runs |= {"attempts": folder / "attempts", "odd name": folder / "it's a[1] {x} -steps-", "resumed": folder / "resumed"}
    train_in_attempts(runs["attempts"])
    shutil.copytree(runs["attempts"], runs["odd name"])
    shutil.copytree(OLD / "schema_3" / "bad", runs["resumed"])
    train(runs["resumed"], range(100, 140, 10))
    return runs


def train_in_attempts(run: Path) -> None:
    """Attempts that overlap, replayed; and what processes leave that are killed while they merge."""
    merging.MERGED, small = 4, dict[Path, bytes]()
    for first, last in ((0, 7), (5, 10), (8, 11)):
        train(run, range(first, last))
        small |= {path: path.read_bytes() for path in run.glob("*/*.parquet")}
    for recipe in ("current-e4m3", "current-e5m2", "current-e4m3"):
        write_replayed_rows(run, replay(run, recipe))
    for path, content in small.items():
        path.write_bytes(content)


def train(run: Path, steps: range) -> None:
    model = nn.Linear(32, 32).bfloat16()
    monitor = Monitor(model, run, interval=1, table_rows=0, recipe="current", what_if=["current-e5m2"], output_rows=4)
    for step in steps:
        with monitor.step(step) as report:
            loss = model(torch.randn(16, 32).bfloat16()).float().square().mean()
            loss.backward()
            report(loss=loss)
    monitor.validation(steps[-1], {"valid": 1.0}) if hasattr(monitor, "validation") else None
    monitor.close()


def job(name: str, run: Path, output: Path) -> dict[str, Any]:
    statements = [each for each in sql_views(run, "spark").split(";\n") if each.strip()]
    return {"statements": statements, "tables": list(SCHEMAS), "output": str(output)}


def compared(run: Path, output: Path) -> dict[str, int]:
    """Rows of each table, all of them equal.

    Raises:
        AssertionError: some are not.
    """
    rows = {}
    for table in SCHEMAS:
        expected = read_record(run, table)
        found = pl.read_parquet(output / table / "*.parquet").cast(dict(expected.schema))  # type: ignore[arg-type]
        keys = [k for k in ("step", "layer", "role", "product", "recipe", "name", "scale") if k in expected.columns]
        assert found.columns == expected.columns, table
        assert found.sort(keys).equals(expected.sort(keys), null_equal=True), f"{table} of {run}"
        rows[table] = len(found)
    return {table: n for table, n in rows.items() if n}


if __name__ == "__main__":
    main()

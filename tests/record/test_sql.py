"""Views in DuckDB, the real engine: the rows are those of `read_record`, whatever lies in the folder."""

from __future__ import annotations

import doctest
import json
import shutil
from pathlib import Path

import duckdb
import polars as pl
import pytest
import spark_views
from samples import sample
from small_record import measured, start
from typer.testing import CliRunner

from nemo_fp8_debug import ConfigError, read_record, replay
from nemo_fp8_debug.analysis.replay.replay import write_replayed_rows
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record import merging, views
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.record.views import sql_views

OLD = Path(__file__).parent / "old"
KEYS = ("step", "layer", "role", "product", "recipe", "name", "scale")


def differing_tables(run: Path, lake: duckdb.DuckDBPyConnection) -> list[str]:
    return [table for table in SCHEMAS if not same(lake.sql(f"SELECT * FROM {table}").pl(), read_record(run, table))]


def same(found: pl.DataFrame, expected: pl.DataFrame) -> bool:
    keys = [name for name in KEYS if name in expected.columns]
    found = found.cast(dict(expected.schema))  # type: ignore[arg-type]
    return found.columns == expected.columns and found.sort(keys).equals(expected.sort(keys), null_equal=True)


def lake_of(run: Path) -> duckdb.DuckDBPyConnection:
    lake = duckdb.connect()
    lake.execute(sql_views(run))
    return lake


@pytest.mark.parametrize("name", ["run", "it's a[1] *{x} -steps-"])
def test_attempts_merges_and_replays(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGED", 4)
    run, killed = tmp_path / name, {}
    for first, last in ((0, 7), (5, 10), (8, 11)):
        record = start(run)
        for step in range(first, last):
            killed |= {path: path.read_bytes() for path in run.glob("*/*.parquet")}
            record.record(measured(step))
            record.record_steps({step: {"loss": step + first / 100}})
        record.record_validation(last - 1, {"valid": 1.0 + first})
        record.close()
    for recipe in ("current-e4m3", "current-e5m2", "current-e4m3"):
        write_replayed_rows(run, replay(run, recipe))
    lake = lake_of(run)
    assert differing_tables(run, lake) == []
    for path, content in killed.items():  # processes were killed while they merged
        path.write_bytes(content)
    assert len(lake.sql("SELECT * FROM metrics_files").pl()) > 3 * 11
    assert differing_tables(run, lake) == []
    assert lake.sql("SELECT count(*) FROM metrics").fetchall() == [(3 * 11,)]


def test_an_exact_row_counts_before_rounded_ones(run: Path) -> None:
    rows = replay(run, "current-e5m2").with_columns(rounded=pl.lit(False))
    for amax in range(4):  # parts in any order, by their checksums
        write_replayed_rows(run, rows.with_columns(rounded=pl.lit(True), amax=pl.lit(float(amax))))
    write_replayed_rows(run, rows)
    key = ["step", "layer", "role"]
    assert read_record(run, "replayed").sort(key).equals(rows.sort(key), null_equal=True)
    assert read_record(run, "replayed", ["step", "amax"])["amax"].sort().equals(rows["amax"].sort())
    assert differing_tables(run, lake_of(run)) == []


def test_parts_that_are_written_later_are_in_the_views(run: Path) -> None:
    lake, record = lake_of(run), start(run)
    record.record(sample(20, [{"layer": "resumed"}]))
    record.record(sample(30, [{"layer": "resumed"}]))
    (run / "metrics" / "attempt-1-step-00000040-00000000.parquet.0123.part").write_bytes(b"half of a part")
    assert differing_tables(run, lake) == []


@pytest.mark.parametrize("name", ["schema_2/bad", "schema_3/bad", "schema_3/twin"])
def test_records_of_earlier_schemas(name: str) -> None:
    assert differing_tables(OLD / name, lake_of(OLD / name)) == []


def test_a_record_of_two_schemas(tmp_path: Path) -> None:
    shutil.copytree(OLD / "schema_3" / "bad", tmp_path / "run")
    start(tmp_path / "run").record(sample(110, [{"layer": "resumed"}]))
    assert differing_tables(tmp_path / "run", lake_of(tmp_path / "run")) == []


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD / "schema_3" / "bad", tmp_path / "runs" / "bad")
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(views) == (0, 4)


def test_the_command_prints_what_duckdb_takes(run: Path) -> None:
    done = CliRunner().invoke(app, ["sql", str(run.parent)])
    assert done.exit_code == 0 and done.stdout == sql_views(run)
    refused = CliRunner().invoke(app, ["sql", str(run), "--engine", "presto"])
    assert refused.exit_code == 1 and "error: engine is 'presto'; use duckdb or spark" in refused.stderr
    with pytest.raises(ConfigError):
        sql_views(run, "presto")


def test_spark_was_given_todays_statements() -> None:
    """What was compared in Spark: scripts/validation/spark_views.py; run it again if the statements change."""
    found = json.loads(Path(spark_views.__file__).with_suffix(".json").read_text())
    assert found["statements"] == spark_views.checksum()
    assert len(found["rows_equal"]) == 5 and all(rows["metrics"] for rows in found["rows_equal"].values())

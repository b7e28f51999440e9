"""A table is read a few columns and steps at a time, and what the footer of a part tells of its rows is not read again."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from samples import sample
from small_record import start

from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.errors import FP8DebugWarning, RecordError
from nemo_fp8_debug.record import outline, parquet
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.scan import TableScan

#: written when checksums were of 64 KiB, and footers told nothing of columns whose rows are alike
OLD = Path(__file__).with_name("old") / "schema_3" / "bad"


def rows(step: int, layers: int = 3) -> list[dict[str, Any]]:
    """Of a step; `calls` and `ranks` are the same everywhere, `inf` is not, and `nonfinite_order` is null."""
    return [
        {
            "layer": f"layer {i}",
            "role": "input",
            "mse": 1.0 + step + i,
            "nan": 0,
            "inf": int(step == 5),
            "calls": 4,
            "ranks": 2,
        }
        for i in range(layers)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record = start(tmp_path)
    for step in range(8):
        record.record(sample(step, rows(step)))
    return tmp_path


def test_columns_whose_rows_are_alike_are_told_by_footers(run: Path) -> None:
    scan = TableScan(run)
    whole = read_table_rows(run, "metrics")
    for part in (run / "metrics").iterdir():
        part.unlink()
    alike = ["calls", "ranks", "nan", "format", "nonfinite_order"]
    found = pl.concat(chunk.rows.select(alike) for chunk in scan.read_chunks(alike))
    assert_frame_equal(found, whole.select(alike))
    assert set(found["calls"]) == {4} and found["nonfinite_order"].null_count() == len(found)
    with pytest.raises(RecordError, match="is gone"):
        list(scan.read_chunks(["mse"]))


def test_what_is_told_is_what_is_read(run: Path) -> None:
    whole = read_table_rows(run, "metrics")
    metrics = MetricsTable.read(run, held=0)
    assert metrics.is_read_lazily
    assert_frame_equal(metrics.read_all_rows(), whole.select(metrics.read_all_rows().columns))
    assert metrics.grid.read_metric("nonfinite").tolist() == [[0.0] * 5 + [1.0] + [0.0] * 2] * 3


texts = st.sampled_from(["e4m3", "e5m2", "", None])
numbers = st.one_of(st.none(), st.integers(0, 1), st.integers(-(1 << 63), (1 << 63) - 1))


@given(st.lists(st.tuples(texts, numbers, st.none() | st.floats(), st.none()), min_size=1, max_size=6), st.integers(1, 6))
def test_a_footer_tells_of_a_column_what_all_of_its_rows_have(values: list[tuple[Any, ...]], at: int) -> None:
    schema = pa.schema([("format", pa.string()), ("n", pa.int64()), ("mse", pa.float64()), ("none", pa.int64())])
    whole = pa.table(
        [pa.array(column, kind) for column, kind in zip(zip(*values, strict=True), schema.types, strict=True)], schema
    )
    keys = pa.table({"step": [0] * len(values), "layer": ["a"] * len(values), "role": ["input"] * len(values)})
    for name in keys.column_names:
        whole = whole.append_column(name, keys[name])
    tables = [each for each in (whole[:at], whole[at:]) if len(each)]
    content, checksum = parquet.encode_parquet_tables(whole.schema, tables)
    told = parquet.OpenPartFile(io.BytesIO(content), checksum).outline
    assert told is not None
    expected = {name: set(whole[name].to_pylist()) for name in ("format", "n", "none", "step", "role")}
    if whole["mse"].null_count == len(whole):
        expected["mse"] = {None}
    assert told.same == {name: next(iter(of_name)) for name, of_name in expected.items() if len(of_name) == 1}


@given(st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 4))
def test_a_footer_tells_which_steps_have_the_same_texts(of_steps: list[list[str | None]], at: int) -> None:
    lengths = [len(of_step) for of_step in of_steps]
    whole = pa.table(
        {
            "step": np.repeat(range(len(of_steps)), lengths),
            "layer": [f"fc{i}" for length in lengths for i in range(length)],
            "role": ["input"] * sum(lengths),
            "format": pa.array([text for of_step in of_steps for text in of_step], pa.string()),
        }
    )
    parts = [part for part in (whole[: sum(lengths[:at])], whole[sum(lengths[:at]) :]) if len(part)]
    told = outline.parse_outline(outline.format_outline(list(map(outline.make_outline, parts))).encode())
    assert told is not None
    assert [told.locate_row(row) for row in range(len(whole))] == [(i, j) for i, n in enumerate(lengths) for j in range(n)]
    if len({text for of_step in of_steps for text in of_step}) == 1:
        assert "format" in told.same and not told.patterns
        return
    for (one, its), (other, others) in itertools.combinations(zip(of_steps, told.patterns["format"], strict=True), 2):
        assert its == others or one != other
        assert its != others or all(a == b for a, b in zip(one, other, strict=False))


@pytest.mark.parametrize("value", ["many", -3, 1 << 70, True, 0.5, [0]])
def test_a_footer_that_tells_what_no_run_writes_is_refused(run: Path, value: Any) -> None:
    part = max((run / "metrics").iterdir())
    table = pa.Table.from_batches(pq.read_table(part).to_batches())
    told = json.loads(outline.format_outline([outline.make_outline(table)]))
    told["same"]["nan"] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "format_outline", lambda _: json.dumps(told))
        content, checksum = parquet.encode_parquet(table)
    part.unlink()
    (part.parent / f"{part.stem[:-8]}{checksum}.parquet").write_bytes(content)
    if type(value) in (int, str):
        with pytest.warns(FP8DebugWarning, match="is left out"):
            steps = MetricsTable.read(run, held=0).read_all_rows(["nan"])["step"].to_list()
        assert steps == [step for step in range(7) for _ in range(3)]
    else:  # not an outline: the rows themselves are read
        assert MetricsTable.read(run, held=0).read_all_rows(["nan"])["nan"].to_list() == [0] * 24


def test_checksums_of_earlier_releases_count() -> None:
    part = max((OLD / "steps").iterdir())
    content = part.read_bytes()
    checksum = part.stem[-8:]
    assert b"crc32_of_64_KiB_blocks" in content and parquet.OpenPartFile(io.BytesIO(content), checksum).count
    for at in (4, len(content) // 2):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            parquet.OpenPartFile(io.BytesIO(bytes(damaged)), checksum).read_wanted_row_groups()


def test_a_column_that_is_held_is_not_overwritten_by_the_next(run: Path) -> None:
    columns = MetricsTable.read(run, held=0).build_grid((("mse",), ("calls", "ranks"), ("inf",)))._columns
    mse = columns["mse"]
    before = mse.copy()
    where = columns["calls"].__array_interface__["data"]
    assert columns["ranks"].tolist() == [[2.0] * 8] * 3 and columns["inf"].sum() == 3
    assert np.array_equal(mse, before) and mse.__array_interface__["data"] != where


def test_a_few_rows_that_are_held_do_not_hold_the_parts_that_they_are_of(tmp_path: Path) -> None:
    record = start(tmp_path)
    for step in range(8):
        record.record(sample(step, rows(step, layers=5000)))
    scan = TableScan(tmp_path)
    only = np.full(5000, -1)
    only[1234:1237] = range(3)
    before = pa.total_allocated_bytes()
    held = [chunk.rows for chunk in scan.read_chunks(["mse", "layer"], operands=only)]
    assert [len(rows) for rows in held] == [3] * 8 and held[5]["mse"].to_list() == [1240.0, 1241.0, 1242.0]
    assert pa.total_allocated_bytes() - before < 8 * 5000 * 8 / 10

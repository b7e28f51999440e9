"""Whose rows of a step count: every reader of a record says the same, whatever killed processes left in it."""

from __future__ import annotations

import random
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal
from samples import sample
from small_record import start

from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.merging import compact_record
from nemo_fp8_debug.record.parts import list_parts_of_table
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage
from nemo_fp8_debug.record.views import sql_views
from nemo_fp8_debug.tensorboard_plugin.records.part_matrices import CachedPartReader

COLUMNS = ["attempt", "step", "layer", "role", "mse"]


def write(run: Path, seed: int) -> None:
    """Three attempts that overlap, experts that come and go, and parts that merging should have removed."""
    chance, left = random.Random(seed), {}
    for attempt, (first, last) in enumerate(((0, 9), (6, 14), (5, 8))):
        record = start(run)
        for step in range(first, last):
            left |= {path: path.read_bytes() for path in run.glob("metrics/*.parquet")}
            layers = [f"experts.{i}" for i in range(4) if i == 0 or chance.random() < 0.6]
            rows = [{"layer": layer, "role": "input", "mse": 100.0 * attempt + step} for layer in layers]
            record.record(sample(step, rows))
        record.close()
    for path, content in left.items():
        if chance.random() < 0.7:
            path.write_bytes(content)


def rows_that_count(run: Path, damaged: Path | None) -> pl.DataFrame:
    """Found without the reader: the rows of a step are the same in all parts of its latest attempt."""
    parts = [pq.read_table(path, columns=COLUMNS) for path in run.glob("metrics/*.parquet") if path != damaged]
    rows = pl.concat([pl.DataFrame(pl.from_arrow(part)) for part in parts]).unique()
    return rows.filter(pl.col("attempt") == pl.col("attempt").max().over("step")).sort(COLUMNS)


def rows_in_the_tab(run: Path) -> pl.DataFrame:
    tab, storage = CachedPartReader(), FolderStorage(run)
    index, found = tab.read_index(storage), []
    for step in index.steps.tolist():
        part = index.owner[step]
        layout, values = tab.read_layout(storage, part), tab.read_metric(storage, part, "mse")
        at = layout.steps.tolist().index(step)
        for (layer, role), value in zip(layout.tensors, values[at].tolist(), strict=True):
            if layout.find_row(step, (layer, role)) is not None:
                found.append((part.attempt, step, layer, role, value))
    kinds = (pl.Int32, pl.Int64, pl.String, pl.String, pl.Float64)
    return pl.DataFrame(found, schema=dict(zip(COLUMNS, kinds, strict=True)), orient="row").sort(COLUMNS)


@pytest.mark.filterwarnings("ignore:nemo_fp8_debug. .*is left out")
@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_all_readers_agree(tmp_path: Path, seed: int, is_damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGED", 3)
    write(tmp_path, seed)
    storage, damaged = FolderStorage(tmp_path), None
    if is_damaged:
        damaged = tmp_path / list_parts_of_table(storage, "metrics")[seed].path
        damaged.write_bytes(damaged.read_bytes()[:-1])
    expected = rows_that_count(tmp_path, damaged)
    assert_frame_equal(read_table_rows(tmp_path, "metrics", COLUMNS).sort(COLUMNS), expected)
    assert_frame_equal(MetricsTable.read(storage, held=0).read_all_rows(COLUMNS).select(COLUMNS).sort(COLUMNS), expected)
    assert_frame_equal(rows_in_the_tab(tmp_path), expected)
    if not is_damaged:
        lake = duckdb.connect()
        lake.execute(sql_views(tmp_path))
        assert_frame_equal(lake.sql(f"SELECT {', '.join(COLUMNS)} FROM metrics").pl().sort(COLUMNS), expected)
    compact_record(tmp_path, killed=True)
    assert_frame_equal(read_table_rows(tmp_path, "metrics", COLUMNS).sort(COLUMNS), expected)
    parts = list_parts_of_table(storage, "metrics")
    assert {part.path for part in parts} == {f"metrics/{path.name}" for path in tmp_path.glob("metrics/*")}
    assert sum(part.path != (damaged and f"metrics/{damaged.name}") for part in parts) == 3  # one an attempt

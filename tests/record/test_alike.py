"""Texts of steps that have the same ones in the same order are read once, and count for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from samples import sample
from small_record import start

from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.scan import TableScan

ROLES = ("input", "weight")


def record(folder: Path, of_steps: list[list[str | None]]) -> Path:
    """Each step has as many layers as texts, and a part of its own."""
    written = start(folder)
    for step, of_step in enumerate(of_steps):
        rows = [{"layer": f"fc{i // 2}", "role": ROLES[i % 2], "scale_source": each} for i, each in enumerate(of_step)]
        written.record(sample(step, rows))
    return folder


steps = st.lists(
    st.sampled_from([["engine"], ["engine", "current", None], ["engine", None, "current"], [None] * 3]), min_size=1
)


@given(steps, st.data())
@settings(max_examples=30)
def test_counts_and_values_are_those_of_all_rows(
    tmp_path_factory: pytest.TempPathFactory, of_steps: list[list[str | None]], data: st.DataObject
) -> None:
    run = record(tmp_path_factory.mktemp("run"), of_steps)
    scanned, held = MetricsTable.read(run, held=0), MetricsTable.from_rows(read_table_rows(run, "metrics"))
    assert scanned.is_read_lazily and not held.is_read_lazily
    some = np.array(sorted(data.draw(st.sets(st.integers(0, len(of_steps) - 1)))), dtype=np.int64)
    role = data.draw(st.sampled_from(ROLES))
    for one, other in (
        (scanned, held),
        (scanned.select_samples(some), held.select_samples(some)),
        (scanned.select_roles(role), held.select_roles(role)),
    ):
        assert_frame_equal(one.tensors, other.tensors)
        assert one.list_distinct_values("scale_source") == other.list_distinct_values("scale_source")
        counts, expected = one.count_rows_by_value("scale_source"), other.count_rows_by_value("scale_source")
        assert {text: n.tolist() for text, n in counts.items()} == {text: n.tolist() for text, n in expected.items()}


def test_no_more_than_one_of_them_is_read(tmp_path: Path) -> None:
    metrics = MetricsTable.read(record(tmp_path, [["engine", "current"]] * 6), held=0)
    _, *others = sorted((tmp_path / "metrics").iterdir())
    assert len(others) == 5
    for part in others:
        part.unlink()
    assert {source: counts.tolist() for source, counts in metrics.count_rows_by_value("scale_source").items()} == {
        "engine": [6, 0],
        "current": [0, 6],
    }


def test_where_one_of_them_cannot_be_read_another_is(tmp_path: Path) -> None:
    scan = TableScan(record(tmp_path, [["engine", "current"]] * 6))
    first = min((tmp_path / "metrics").iterdir())
    damaged = bytearray(first.read_bytes())
    damaged[4 : len(damaged) // 2] = bytes(len(damaged) // 2 - 4)
    first.write_bytes(damaged)
    with pytest.warns(FP8DebugWarning, match="is left out"):
        ((chunk, times),) = scan.group_equal_steps("scale_source")
    assert chunk.rows["scale_source"].to_list() == ["engine", "current"] and times == [5]

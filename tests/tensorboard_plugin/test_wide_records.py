"""Of a record with more tensors than a row group has rows, one tensor is read without the others: with the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from banded_runs import write_runs
from samples import sample
from tab import Tab, start

from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record import parquet
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.tensorboard_plugin.records import part_matrices

LAYERS, STEPS = parquet.GROUP + 100, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("banded")
    write_runs(folder)
    return folder


def test_answers_are_those_of_a_record_that_is_held(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Tab(pair)
    tensors = narrow.json("run", run="bad")["tensors"]
    metrics = ",".join((*METRICS, "nonfinite"))
    asked = list(zip(tensors["layer"], tensors["role"], strict=True))[:: len(tensors["layer"]) // 4]

    def answers(tab: Tab) -> list[object]:
        timelines = [tab.json("timeline", run="bad", layer=a, role=b, metrics=metrics) for a, b in asked]
        return timelines + [tab.json("band", run="bad", baseline="good", layer=a, role=b) for a, b in asked]

    before = answers(narrow)
    monkeypatch.setattr(part_matrices, "GROUP", 1)
    assert len(asked) > 1
    assert answers(Tab(pair)) == before


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record, random = start(tmp_path_factory.mktemp("wide") / "run"), np.random.default_rng(2)
    for step in range(STEPS):
        values = random.uniform(size=LAYERS).tolist()
        record.record(sample(step, [{"layer": f"layers.{i}.fc1", "mse": value} for i, value in enumerate(values)]))
    record.close()
    return Path(record.storage.path("")).parent


def test_every_row_group_is_found(wide: Path) -> None:
    tab, rows = Tab(wide), read_table_rows(wide / "run", "metrics", ["step", "layer", "role", "mse"])
    assert len(rows.filter(step=0)) > parquet.GROUP
    for layer in (0, 1, LAYERS // 2, LAYERS - 1):
        mine = rows.filter(layer=f"layers.{layer}.fc1")
        for role in mine["role"].unique():
            found = tab.json("timeline", run="run", layer=f"layers.{layer}.fc1", role=role, metrics="mse")
            assert found["metrics"]["mse"] == mine.filter(role=role)["mse"].to_list()
            assert found["step"] == list(range(STEPS))


def test_texts_that_footers_tell_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three parts, the second has texts of its own; all but those of the first can be lost, if they are the same."""
    monkeypatch.setattr(part_matrices, "GROUP", 1)
    record = start(tmp_path / "run")
    formats = [["e4m3", "e5m2"], ["e5m2", "e4m3"], ["e4m3", "e5m2"]]
    for step, of_step in enumerate(formats):
        record.record(sample(step, [{"layer": f"fc{i}", "format": text} for i, text in enumerate(of_step)]))
    record.close()

    def told() -> list[list[str | None]]:
        tab = Tab(tmp_path)
        of_layers = (tab.json("timeline", run="run", layer=f"fc{i}", role="input", metrics="mse") for i in range(2))
        return [list(of_step) for of_step in zip(*(found["format"] for found in of_layers), strict=True)]

    assert told() == formats
    for part in sorted((tmp_path / "run" / "metrics").iterdir())[1:]:
        of_format = next(
            c for c in pq.read_metadata(part).row_group(0).to_dict()["columns"] if c["path_in_schema"] == "format"
        )
        content = bytearray(part.read_bytes())
        content[of_format["dictionary_page_offset"]] ^= 1
        part.write_bytes(content)
    assert told() == [formats[0], [None, None], formats[2]]


def test_a_damaged_part_costs_its_own_steps(wide: Path) -> None:
    part = max((wide / "run" / "metrics").iterdir())
    content = bytearray(part.read_bytes())
    for at in range(0, len(content) * 9 // 10, parquet.BLOCK):
        content[at] ^= 1
    part.write_bytes(content)
    tab, steps = Tab(wide), pl.Series(range(STEPS))
    found = tab.json("timeline", run="run", layer="layers.0.fc1", role="input", metrics="mse")
    assert (pl.Series(found["metrics"]["mse"]).is_null() == (steps == STEPS - 1)).all()
    assert any("damaged" in note for note in tab.json("run", run="run")["notes"])

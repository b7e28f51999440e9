"""A record of which columns are read as they are needed tells the same as one that is held, however little is held."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from samples import FINGERPRINT, sample

from nemo_fp8_debug.analysis.bands.bands import HealthyBands, judge_by_bands
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.facts import DiagnosedRecords
from nemo_fp8_debug.analysis.diagnosis.rules.weights import still_weights
from nemo_fp8_debug.analysis.recommendation.recommend import flops_of
from nemo_fp8_debug.analysis.runs import blocks, cluster, grid, metrics
from nemo_fp8_debug.analysis.runs.blocks import compute_column_median
from nemo_fp8_debug.analysis.runs.cluster import on_cluster
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import serialize_comparison
from nemo_fp8_debug.errors import ConfigError, RecordError
from nemo_fp8_debug.record.writer import RunRecordWriter

DEMO = Path(__file__).parents[2] / "scripts" / "validation" / "main_job" / "records"
NAMES = ("baseline", "learning_rate", "reference")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few tensors, and of these one or two at a time."""
    monkeypatch.setattr(blocks, "CELLS", 30_000)
    monkeypatch.setattr(grid, "_CELLS", 1500)


def held() -> list[Run]:
    return [Run.read(DEMO / name) for name in NAMES]


def as_needed() -> list[Run]:
    return [Run.read(DEMO / name, held=0) for name in NAMES]


def told_of_pair(runs: list[Run]) -> Any:
    baseline, bad, reference = runs
    found = diagnose(bad, baseline, reference)
    assert found.comparison is not None
    return serialize_comparison(found.comparison), found.to_json(), story(found)


def told_alone(runs: list[Run]) -> Any:
    found = diagnose(runs[1])
    return found.to_json(), story(found)


def learned(runs: list[Run]) -> Any:
    few = HealthyBands.learn([replace(run, path=f"{i}") for i in range(6) for run in runs[:1]])
    found = judge_by_bands(runs[1], few)
    return few.table.to_dicts(), found.beyond.to_dicts(), found.covered.rows(), found.operands


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("tell", [told_of_pair, told_alone, learned], ids=lambda tell: tell.__name__)
def test_what_is_told_does_not_depend_on_how_much_is_held(
    tell: Callable[[list[Run]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = tell(as_needed())
    monkeypatch.undo()
    assert json.dumps(needed, default=str) == json.dumps(tell(held()), default=str)


@pytest.mark.parametrize("last", [{"n": 8}, {"n": 4, "ranks_missing": 1}, {"n": None}, {"layer": "fc2", "n": 2}])
def test_a_weight_has_the_size_that_it_has_with_all_ranks(last: dict[str, Any]) -> None:
    row = {"step": 0, "layer": "fc1", "role": "weight", "n": 8, "nan": 0, "inf": 0, "ranks_missing": 0}
    sizes = MetricsTable.from_rows(pl.DataFrame([row, row | {"step": 5} | last])).weight_sizes
    assert sizes == {"fc1": 8} | ({"fc2": 2} if "layer" in last else {})


def test_steps_layers_and_rows_can_be_chosen() -> None:
    needed, of_held = (Run.read(DEMO / "learning_rate", held=rows).metrics for rows in (0, metrics.HELD))
    axis = pl.DataFrame({"step": needed.steps[::2], "sample": needed.steps[::2] * 64})
    names = {"decoder.layers.0.mlp.linear_fc1": "first.fc1"}
    chosen = [
        each.renumber_steps(axis)
        .rename_layers(names)
        .filter_rows("format", ["e4m3"])
        .select_roles("weight", "input")
        .drop_steps([64 * 20])
        for each in (needed, of_held)
    ]
    assert 0 < len(chosen[0].steps) < len(needed.steps) and 0 < len(chosen[0].tensors) < len(needed.tensors)
    assert chosen[0].tensors.equals(chosen[1].tensors) and chosen[0].steps.tolist() == chosen[1].steps.tolist()
    assert_frame_equal(chosen[0].read_all_rows(), chosen[1].read_all_rows())
    assert np.array_equal(*(each.grid.read_metric("mse") for each in chosen), equal_nan=True)
    assert_frame_equal(*(each.read_last_samples(["recipe", "mse"]) for each in chosen))
    assert flops_of(needed) == pytest.approx(flops_of(of_held), rel=1e-12)


def test_weights_that_never_move_are_found_in_a_long_record(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, frozen in (("bad", {"b"}), ("good", set[str]())):
        record = RunRecordWriter(tmp_path / name)
        record.open(FINGERPRINT)
        for step in range(0, 40, 5):
            values = {layer: 0.0 if layer in frozen else random.normal() for layer in "abc"}
            names = ("dynamic_range_log2", "outlier_log2", "kurtosis")
            rows = [{"layer": layer, "role": "weight", **dict.fromkeys(names, 9 + of)} for layer, of in values.items()]
            record.record(sample(step, rows))
        record.close()
    for held in (0, metrics.HELD):
        bad, good = (Run.read(tmp_path / name, held=held) for name in ("bad", "good"))
        assert still_weights.measure(DiagnosedRecords(bad, good)).never_moved == ("b",)


@pytest.mark.parametrize("rows", [[1.0], [2.0, 1.0], [np.nan, 3.0, -1.0, -0.0], [np.inf, -np.inf, 5.0], [7.0] * 40, []])
@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_a_median_is_exact(rows: list[float], at_once: int) -> None:
    check_median(rows, at_once)


@given(st.lists(st.floats() | st.sampled_from([0.0, 1.0, 1e-300]), max_size=60), st.integers(1, 9))
def test_any_median_is_exact(rows: list[float], at_once: int) -> None:
    check_median(rows, at_once)


def check_median(values: list[float], at_once: int) -> None:
    frame = pl.DataFrame(
        {"step": range(len(values)), "layer": "a", "role": "input", "mse": values}, schema_overrides={"mse": pl.Float64}
    )
    found = compute_column_median(MetricsTable.from_rows(frame), "mse", at_once)
    known = [value for value in values if not np.isnan(value)]
    with np.errstate(invalid="ignore"):
        expected = np.median(known) if known else np.nan
    assert found == expected or (np.isnan(found) and np.isnan(expected))


@pytest.mark.usefixtures("little_memory")
def test_workers_of_a_cluster_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler and a worker of Dask, in processes of their own; for Ray see scripts/validation/clusters.py."""
    with on_cluster("dask"):
        assert cluster.count_cluster_workers() > 0
        shared = told_of_pair(as_needed())
    assert cluster.count_cluster_workers() == 0
    monkeypatch.undo()
    assert json.dumps(shared, default=str) == json.dumps(told_of_pair(held()), default=str)


def asked_of_a_worker(what: str) -> int:
    """Another process, which may fail or die."""
    if what == "fail":
        raise RecordError("runs/bad is gone")
    if what == "die":
        os._exit(1)
    return os.getpid()


def test_a_worker_that_fails_or_dies_is_told_in_a_line() -> None:
    with on_cluster("dask"):
        assert os.getpid() not in cluster.map_on_cluster(asked_of_a_worker, ["answer", "answer"])
        with pytest.raises(RecordError, match=r"^runs/bad is gone$"):
            cluster.map_on_cluster(asked_of_a_worker, ["answer", "fail"])
        with pytest.raises(ConfigError, match="lost workers; give each more memory"):
            cluster.map_on_cluster(asked_of_a_worker, ["die"])


@pytest.mark.parametrize(
    ("address", "why"), [("spark", "is no cluster address; write ray"), ("tcp://127.0.0.1:1", "there is no cluster at")]
)
def test_a_cluster_that_is_not_there_is_named(address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 1)
    with pytest.raises(ConfigError, match=why), on_cluster(address):
        pass


@given(st.integers(10_000, 300_000), st.integers(1, 4), st.integers(2, 8))
def test_workers_get_as_many_blocks(tensors: int, turns: int, workers: int) -> None:
    some = blocks._slices(tensors, -(-tensors // (turns * workers)), workers)
    assert [each.start for each in some] == [0, *(each.stop for each in some[:-1])] and some[-1].stop == tensors
    assert len(some) % workers == 0

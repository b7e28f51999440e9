"""What the tab answers, against the record as `read_table` has it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sample
from tab import FC1, FC2, Tab, expected_frames, start

from nemo_fp8_debug.analysis.comparison.drift import add_kind_and_depth_columns
from nemo_fp8_debug.core.keys import SHOWN_AS
from nemo_fp8_debug.numerics.formats import FORMATS
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.tensorboard_plugin.records.metadata import NUMBERS
from nemo_fp8_debug.tensorboard_plugin.records.thinning import thin_series

NOT_QUANTIZED = "Nothing in the run is quantized, so the metrics show what FP8 would do to it."


@pytest.mark.parametrize(
    "metric", ["mse", "underflow_pct", "cosine", "kurtosis", "amax", "nan", "nonfinite", "scale", "experts"]
)
@pytest.mark.parametrize(("first", "last"), [(0, 10**18 - 1), (600, 700), (45, 55), (630, 640), (701, 800)])
def test_frames_are_the_record(two_runs: Path, tab: Tab, metric: str, first: int, last: int) -> None:
    expected = expected_frames(two_runs / "odd/fp8_debug", metric, first, last)
    header, values = tab.frames(run="odd", metric=metric, from_=first, to=last)
    assert header["steps"] == sorted({step for step, _, _ in expected})
    tensors = list(zip(header["layer"], header["role"], strict=True))
    assert len(set(tensors)) == len(tensors) and set(tensors) >= {key[1:] for key in expected}
    for i, step in enumerate(header["steps"]):
        for j, key in enumerate(tensors):
            want = expected.get((step, *key), np.float32(np.nan))
            assert values[i, j].tobytes() == want.tobytes() or (np.isnan(values[i, j]) and np.isnan(want))


def test_frames_say_where_each_tensor_is(tab: Tab) -> None:
    """Of tensors that the newest part lacks as well."""
    header, _ = tab.frames(run="odd", metric="mse", from_=0, to=700)
    expected = add_kind_and_depth_columns(pl.DataFrame({name: header[name] for name in ("layer", "role")}))
    assert {name: header[name] for name in ("layer", "role", "kind", "depth")} == {
        name: expected[name].to_list() for name in ("layer", "role", "kind", "depth")
    }
    found = dict(zip(header["layer"], zip(header["kind"], header["depth"], strict=True), strict=True))
    assert found == {FC1: ("linear_fc1", 0), FC2: ("linear_fc2", 1), "output_layer": ("output_layer", None)}


@pytest.mark.parametrize("run", ["odd", "counted"])
@pytest.mark.parametrize("metric", ["mse", "underflow_pct", "cosine", "kurtosis", "amax", "nonfinite", "scale", "experts"])
def test_an_extent_is_that_of_all_steps(two_runs: Path, tab: Tab, run: str, metric: str) -> None:
    rows = read_table_rows(two_runs / run / "fp8_debug", "metrics")
    column = rows["nan"] + rows["inf"] if metric == "nonfinite" else rows[metric]
    values = [float(value) for value in column if value is not None and math.isfinite(value)]
    above = [value for value in values if value > 0]
    found = tab.json("extent", run=run, metric=metric)
    assert {name: found[name] for name in ("low", "high", "positive")} == {
        "low": min(values, default=None),
        "high": max(values, default=None),
        "positive": min(above, default=None),
    }


def test_an_extent_is_not_that_of_steps_that_were_trained_again(tmp_path: Path) -> None:
    """Of a merged part some steps, of a small one its only one."""
    for first, last, mse in ((0, 64, 0.0), (63, 66, -50.0), (65, 66, -30.0)):
        record = start(tmp_path / "run")
        for step in range(first, last):
            record.record(sample(step, [{"mse": mse + step}]))
        record.close()
    assert any("steps" in part.name for part in (tmp_path / "run/metrics").iterdir())
    found = Tab(tmp_path).json("extent", run="run", metric="mse")
    assert (found["low"], found["high"], found["positive"]) == (0.0, 62.0, 1.0)


@pytest.mark.parametrize("metric", ["mse", "sqnr_db", "kurtosis", "scale_ratio_log2"])
def test_percentiles_and_sizes_are_those_of_the_values_behind_the_warm_up(tmp_path: Path, metric: str) -> None:
    random, record = np.random.default_rng(0), start(tmp_path / "run")
    for step in range(70):  # merged, and small parts
        values = random.lognormal(sigma=2, size=12) * random.choice([-1, 1], 12) * (1e6 if step < 7 else 1)
        record.record(sample(step, [{"layer": f"layers.{i}.fc", metric: float(value)} for i, value in enumerate(values)]))
    record.close()
    found = Tab(tmp_path).json("extent", run="run", metric=metric)
    later = np.sort(read_table_rows(tmp_path / "run", "metrics").filter(pl.col("step") > 6)[metric].to_numpy())
    assert found["warm_up"] == 6
    expected = np.quantile(later, [0.01, 0.5, 0.99], method="inverted_cdf")
    assert found["percentiles"] == pytest.approx(expected.tolist(), rel=2**-8)
    assert sum(found["counts"]) == len(later) and found["values"] == sorted(found["values"])
    upto = np.searchsorted(
        later, np.array(found["values"]) * np.where(np.array(found["values"]) > 0, 1 + 2**-3, 1 - 2**-8), "right"
    )
    assert np.abs(upto - np.cumsum(found["counts"])).max() <= 0.02 * len(later)


def test_a_run_is_described(two_runs: Path, tab: Tab) -> None:
    about = tab.json("run", run="counted")
    rows = read_table_rows(two_runs / "counted/fp8_debug", "metrics")
    tensors = add_kind_and_depth_columns(
        rows.filter(pl.col("step") == 20).select("layer", "role")
    )  # in order of execution already
    assert about["run"] == "counted" and about["steps"] == [0, 10, 20] and about["notes"] == [NOT_QUANTIZED]
    assert about["tensors"] == {name: tensors[name].to_list() for name in ("layer", "role", "kind", "depth")}
    assert "started 2 times" in tab.json("run", run="odd")["notes"][0]


def test_a_layer_of_a_number_beyond_all_layers_has_no_depth(tmp_path: Path) -> None:
    record = start(tmp_path)
    layer = "layers.99999999999999999999.fc1"
    record.record(sample(0, [{"layer": layer}]))
    record.close()
    tensors = Tab(tmp_path).json("run", run=".")["tensors"]
    assert (tensors["layer"], tensors["kind"], tensors["depth"]) == ([layer], ["fc1"], [None])
    assert add_kind_and_depth_columns(pl.DataFrame({"layer": [layer]}))["depth"].to_list() == [None]


def test_a_timeline_is_the_record(two_runs: Path, tab: Tab) -> None:
    metrics = ["mse", "underflow_pct", "amax", "nonfinite"]
    found = tab.json("timeline", run="odd", layer=FC1, role="input", metrics=",".join(metrics))
    rows = read_table_rows(two_runs / "odd/fp8_debug", "metrics").filter(layer=FC1, role="input").sort("step")
    rows = rows.with_columns(nonfinite=pl.col("nan") + pl.col("inf"))
    assert found["step"] == rows["step"].to_list() and len(found["step"]) == 58
    assert found["metrics"] == {name: rows[name].to_list() for name in metrics}
    assert all(found[name] == rows[name].to_list() for name in ("recipe", "format", "scale_source"))
    assert tab.json("timeline", run="odd", layer=FC2, role="input", metrics="kurtosis")["metrics"]["kurtosis"][0] is None
    status, why = tab.error("timeline", run="odd", layer="none", role="input", metrics="mse")
    assert status == 404 and "'none'" in why


@pytest.mark.parametrize(("asked", "nearest"), [(0, 0), (4, 0), (6, 10), (5, 0), (10**17, 20)])
def test_a_histogram_is_the_record(two_runs: Path, tab: Tab, asked: int, nearest: int) -> None:
    run = two_runs / "counted/fp8_debug"
    found = tab.json("histogram", run="counted", layer=FC1, role="input", step=asked)
    where = {"step": nearest, "layer": FC1, "role": "input"}
    names = ["recipe", "format", "dtype", "rounded", "scale", "bins", "counts"]
    assert found["step"] == nearest
    assert found["rows"] == read_table_rows(run, "histograms", where=where).select(names).to_dicts()
    assert found["recorded"] == read_table_rows(run, "metrics", where=where).to_dicts()[0]
    assert list(found["recorded"]) == list(SCHEMAS["metrics"])


def test_a_missing_histogram_is_explained(tab: Tab) -> None:
    status, why = tab.error("histogram", run="odd", layer=FC1, role="input", step=10)
    assert status == 404 and "record the run with histograms" in why
    status, why = tab.error("histogram", run="counted", layer=FC1, role="grad_output", step=10)
    assert status == 404 and FC1 in why


def test_other_recipes_are_the_record(tmp_path: Path) -> None:
    record = start(tmp_path / "run")
    for step in (0, 10):
        used = sample(step, [{"mse": 1.0 + step}, {"layer": FC2, "mse": None}])
        what_if = sample(step, [{"recipe": "mxfp8-e4m3", "mse": 0.5 + step}]).operand_columns
        record.record(used.__class__(step, {**used.tables, "what_if": what_if}, {}))
    record.close()
    found = Tab(tmp_path).json("others", run="run", step=11)
    assert found["step"] == 10
    rows = pl.DataFrame(found["rows"])
    assert rows.select("recipe", "in_use", "mse").rows() == [
        ("delayed-hybrid", True, 11.0),
        ("delayed-hybrid", True, None),
        ("mxfp8-e4m3", False, 10.5),
    ]


def test_other_recipes_are_those_of_the_attempt_that_is_shown(tmp_path: Path) -> None:
    for mse, tries in ((1.0, True), (2.0, False)):
        record = start(tmp_path / "run")
        used, what_if = sample(0, [{"mse": mse}]), sample(0, [{"recipe": "mxfp8-e4m3", "mse": 0.5}])
        record.record(used.__class__(0, {**used.tables, "what_if": what_if.operand_columns if tries else {}}, {}))
        record.close()
    rows = Tab(tmp_path).json("others", run="run", step=0)["rows"]
    assert (rows["recipe"], rows["mse"]) == (["delayed-hybrid"], [2.0])


def test_losses_triggers_and_skipped_steps(tab: Tab) -> None:
    found = tab.json("loss", run="odd")
    assert found["step"][:3] == [0, 1, 2] and found["loss"][:2] == [2.0, 2.01] and found["lr"][0] == 1e-3
    assert found["grad_norm"][0] is None
    at = found["step"].index(600)
    assert found["loss"][at] is None
    assert found["triggers"] == [[600, "spike"], [690, "spike"], [700, "spike"]] and found["skipped"] == [600, 690, 700]
    assert set(found["spikes"]) >= {600, 690, 700}


def test_a_spike_of_the_loss_is_found_and_stays_in_the_thinned_curve(tmp_path: Path) -> None:
    record = start(tmp_path)
    losses = 2 + np.random.default_rng(0).normal(0, 0.01, 20_000)
    losses[12_345] = 9.0
    record.record_steps({i: {"loss": float(loss)} for i, loss in enumerate(losses)})
    record.close()
    found = Tab(tmp_path).json("loss", run=".")
    assert len(found["step"]) <= 4000 and 12_345 in found["spikes"] and len(found["spikes"]) < 20
    assert dict(zip(found["step"], found["loss"], strict=True))[12_345] == 9.0


@given(st.lists(st.floats(), max_size=400), st.integers(20, 100))
def test_thinning_keeps_extremes(values: list[float], points: int) -> None:
    series = np.array(values, np.float64)
    kept = thin_series([series], points)
    assert len(kept) <= points or len(values) <= points
    assert (np.diff(kept) > 0).all()
    if finite := [v for v in values if math.isfinite(v)]:
        assert {min(finite), max(finite)} <= set(series[kept].tolist())


def test_fingerprints_and_their_differences(tmp_path: Path) -> None:
    start(tmp_path / "a", lr=float("nan")).close()
    start(tmp_path / "b", lr=2).close()
    tab = Tab(tmp_path)
    found = tab.json("fingerprints", a="a", b="b")
    assert found["a"]["versions"] == {"torch": "2.8.0"} and found["a"]["lr"] is None
    assert found["differences"] == [{"setting": "lr", "baseline": "nan", "run": "2", "telling": False}]
    assert tab.json("fingerprints", a="a") == {"a": found["a"], "b": None, "differences": [], "learning_rates": None}


def test_a_fingerprint_that_utf_8_cannot_say_is_escaped(tmp_path: Path) -> None:
    start(tmp_path / "a", lr="x").close()
    start(tmp_path / "b", lr="\ud800").close()
    (row,) = Tab(tmp_path).json("fingerprints", a="a", b="b")["differences"]
    assert (row["baseline"], row["run"]) == ("x", "\\ud800")


def test_the_browser_is_told_the_formats_and_metrics(tab: Tab) -> None:
    about = tab.json("runs")
    numbers = {
        name: {"max": f.max, "min_normal": f.min_normal, "min_subnormal": f.min_subnormal, "bits": f.bits}
        for name, f in FORMATS.items()
    }
    assert about["formats"] == numbers and about["roles"] == SHOWN_AS
    assert {"input": "X", "weight": "W", "grad_output": "dY", "probabilities": "S"}.items() <= about["roles"].items()
    assert {metric["name"] for metric in about["metrics"]} <= set(NUMBERS)


def test_the_script_is_kept_by_its_content(tab: Tab) -> None:
    first = tab.get("index.js")
    assert first.status_code == 200 and first.mimetype == "text/javascript" and b"render" in first.data
    assert tab.get("index.js", {"If-None-Match": first.headers["ETag"]}).status_code == 304
    assert tab.get("index.js", {"If-None-Match": '"other"'}).status_code == 200


def test_answers_are_neither_kept_nor_sniffed(tab: Tab) -> None:
    for response in (tab.get("runs"), tab.get("frames", run="odd", metric="mse", from_=0, to=0), tab.get("run", run="?")):
        assert response.headers["Cache-Control"] == "no-store" and response.headers["X-Content-Type-Options"] == "nosniff"

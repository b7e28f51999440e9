"""What the tab answers, against the record as `read_table` has it; and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import wait_until
from samples import sample
from tab import FC1, FC2, Tab, start, write_counted_run, write_odd_run

from nemo_fp8_debug.analysis.comparison.groups import placed
from nemo_fp8_debug.numerics.formats import FORMATS
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.reader import read_table
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.tensorboard_plugin.records.losses import thinned
from nemo_fp8_debug.tensorboard_plugin.records.metadata import NUMBERS


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logdir")
    write_odd_run(folder / "odd" / "fp8_debug")
    write_counted_run(folder / "counted" / "fp8_debug")
    return folder


@pytest.fixture(scope="module")
def tab(logdir: Path) -> Tab:
    return Tab(logdir)


def expected_frames(run: Path, metric: str, first: int, last: int) -> dict[tuple[int, str, str], np.float32]:
    rows = read_table(run, "metrics").filter(pl.col("step").is_between(first, last))
    column = pl.col("nan") + pl.col("inf") if metric == "nonfinite" else pl.col(metric)
    with np.errstate(over="ignore"):
        return {
            tuple(key): np.float32(np.nan if value is None else value)  # type: ignore[misc]
            for *key, value in rows.select("step", "layer", "role", column.cast(pl.Float64)).iter_rows()
        }


@pytest.mark.parametrize(
    "metric", ["mse", "underflow_pct", "cosine", "kurtosis", "amax", "nan", "nonfinite", "scale", "experts"]
)
@pytest.mark.parametrize(("first", "last"), [(0, 10**18 - 1), (600, 700), (45, 55), (630, 640), (701, 800)])
def test_frames_are_the_record(logdir: Path, tab: Tab, metric: str, first: int, last: int) -> None:
    expected = expected_frames(logdir / "odd/fp8_debug", metric, first, last)
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
    expected = placed(pl.DataFrame({name: header[name] for name in ("layer", "role")}))
    assert {name: header[name] for name in ("layer", "role", "kind", "depth")} == {
        name: expected[name].to_list() for name in ("layer", "role", "kind", "depth")
    }
    found = dict(zip(header["layer"], zip(header["kind"], header["depth"], strict=True), strict=True))
    assert found == {FC1: ("linear_fc1", 0), FC2: ("linear_fc2", 1), "output_layer": ("output_layer", None)}


@pytest.mark.parametrize("run", ["odd", "counted"])
@pytest.mark.parametrize("metric", ["mse", "underflow_pct", "cosine", "kurtosis", "amax", "nonfinite", "scale", "experts"])
def test_an_extent_is_that_of_all_steps(logdir: Path, tab: Tab, run: str, metric: str) -> None:
    rows = read_table(logdir / run / "fp8_debug", "metrics")
    column = rows["nan"] + rows["inf"] if metric == "nonfinite" else rows[metric]
    values = [float(value) for value in column if value is not None and math.isfinite(value)]
    above = [value for value in values if value > 0]
    assert tab.json("extent", run=run, metric=metric) == {
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
    assert Tab(tmp_path).json("extent", run="run", metric="mse") == {"low": 0.0, "high": 62.0, "positive": 1.0}


def test_a_run_is_described(logdir: Path, tab: Tab) -> None:
    about = tab.json("run", run="counted")
    rows = read_table(logdir / "counted/fp8_debug", "metrics")
    tensors = placed(rows.filter(pl.col("step") == 20).select("layer", "role"))
    assert about["run"] == "counted" and about["steps"] == [0, 10, 20] and about["notes"] == []
    assert about["tensors"] == {name: tensors[name].to_list() for name in ("layer", "role", "kind", "depth")}
    assert "started 2 times" in tab.json("run", run="odd")["notes"][0]


def test_a_layer_of_a_number_beyond_all_layers_has_no_depth(tmp_path: Path) -> None:
    record = start(tmp_path)
    layer = "layers.99999999999999999999.fc1"
    record.record(sample(0, [{"layer": layer}]))
    record.close()
    tensors = Tab(tmp_path).json("run", run=".")["tensors"]
    assert (tensors["layer"], tensors["kind"], tensors["depth"]) == ([layer], ["fc1"], [None])
    assert placed(pl.DataFrame({"layer": [layer]}))["depth"].to_list() == [None]


def test_a_timeline_is_the_record(logdir: Path, tab: Tab) -> None:
    metrics = ["mse", "underflow_pct", "amax", "nonfinite"]
    found = tab.json("timeline", run="odd", layer=FC1, role="input", metrics=",".join(metrics))
    rows = read_table(logdir / "odd/fp8_debug", "metrics").filter(layer=FC1, role="input").sort("step")
    rows = rows.with_columns(nonfinite=pl.col("nan") + pl.col("inf"))
    assert found["step"] == rows["step"].to_list() and len(found["step"]) == 58
    assert found["metrics"] == {name: rows[name].to_list() for name in metrics}
    assert all(found[name] == rows[name].to_list() for name in ("recipe", "format", "scale_source"))
    assert tab.json("timeline", run="odd", layer=FC2, role="input", metrics="kurtosis")["metrics"]["kurtosis"][0] is None
    status, why = tab.error("timeline", run="odd", layer="none", role="input", metrics="mse")
    assert status == 404 and "'none'" in why


@pytest.mark.parametrize(("asked", "nearest"), [(0, 0), (4, 0), (6, 10), (5, 0), (10**17, 20)])
def test_a_histogram_is_the_record(logdir: Path, tab: Tab, asked: int, nearest: int) -> None:
    run = logdir / "counted/fp8_debug"
    found = tab.json("histogram", run="counted", layer=FC1, role="input", step=asked)
    where = {"step": nearest, "layer": FC1, "role": "input"}
    names = ["recipe", "format", "dtype", "rounded", "scale", "bins", "counts"]
    assert found["step"] == nearest
    assert found["rows"] == read_table(run, "histograms", where=where).select(names).to_dicts()
    assert found["recorded"] == read_table(run, "metrics", where=where).to_dicts()[0]
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
        what_if = sample(step, [{"recipe": "mxfp8-e4m3", "mse": 0.5 + step}]).columns
        record.record(used.__class__(step, used.columns, {}, what_if=what_if))
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
        record.record(used.__class__(0, used.columns, {}, what_if=what_if.columns if tries else None))
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
    kept = thinned([series], points)
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
    assert tab.json("fingerprints", a="a") == {"a": found["a"], "b": None, "differences": []}


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
    assert about["formats"] == numbers and about["roles"] == {"input": "X", "weight": "W", "grad_output": "dY"}
    assert {metric["name"] for metric in about["metrics"]} <= set(NUMBERS)


def test_the_script_is_kept_by_its_content(tab: Tab) -> None:
    first = tab.get("index.js")
    assert first.status_code == 200 and first.mimetype == "text/javascript" and b"render" in first.data
    assert tab.get("index.js", {"If-None-Match": first.headers["ETag"]}).status_code == 304
    assert tab.get("index.js", {"If-None-Match": '"other"'}).status_code == 200


def test_answers_are_neither_kept_nor_sniffed(tab: Tab) -> None:
    for response in (tab.get("runs"), tab.get("frames", run="odd", metric="mse", from_=0, to=0), tab.get("run", run="?")):
        assert response.headers["Cache-Control"] == "no-store" and response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:9999"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Origin": "http://localhost:6006", "Host": "localhost:6006"}, 200),
        ({"Origin": "http://localhost:6007", "Host": "localhost:6006"}, 403),
        ({"Origin": "https://hub.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "hub.example, inner"}, 200),
        ({"Origin": "https://hub.example", "Host": "10.0.0.7:6006", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://evil.example", "Host": "10.0.0.7:6006", "X-Forwarded-Host": "hub.example"}, 403),
    ],
)
def test_other_sites_are_refused(tab: Tab, headers: dict[str, str], status: int) -> None:
    for route in ("runs", "index.js"):
        assert tab.get(route, headers).status_code == status


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_only_get_is_answered(tab: Tab, method: str) -> None:
    assert getattr(tab.client, method)("/data/plugin/fp8/runs").status_code == 405


def test_works_below_a_prefix(logdir: Path) -> None:
    tab = Tab(logdir, prefix="/proxy/6006")
    assert [run["name"] for run in tab.json("runs")["runs"]] == ["counted", "odd"]


ROUTES = ("runs", "run", "frames", "extent", "timeline", "loss", "histogram", "others", "fingerprints")
NAMES = ("run", "layer", "role", "step", "metric", "metrics", "from", "to", "a", "b", "recipe", "x")
WORDS = (
    *("odd", "counted", FC1, "input", "mse", "mse,amax", "nonfinite", "mse,mse", "0", "10", "700"),
    *("-1", "NaN", "1e400", "9" * 40, "1_0", "\u0663", "+1", "", "\x00", "\ud800", "a" * 5000),
    *("../../etc/passwd", "/etc/passwd", "odd/../odd", "<script>alert(1)</script>"),
)
HOSTILE = st.one_of(st.sampled_from(WORDS), st.text(max_size=20))
USUAL = {"run": "odd", "layer": FC1, "role": "input", "step": "10", "metric": "mse", "metrics": "mse"} | {
    "from": "0",
    "to": "90",
}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    route=st.sampled_from(ROUTES),
    given_=st.lists(st.tuples(st.sampled_from(NAMES), HOSTILE), max_size=5),
    right=st.booleans(),
)
def test_no_parameter_makes_it_fail(tab: Tab, route: str, given_: list[tuple[str, str]], right: bool) -> None:
    takes = {
        "runs": (),
        "run": ("run",),
        "frames": ("run", "metric", "from", "to"),
        "extent": ("run", "metric"),
        "timeline": ("run", "layer", "role", "metrics"),
        "loss": ("run",),
        "histogram": ("run", "layer", "role", "step"),
        "others": ("run", "step"),
        "fingerprints": ("a",),
    }[route]
    query: list[tuple[str, str]] = given_
    if right:  # one odd value among usual ones
        query = list(({name: USUAL.get(name, "odd") for name in takes} | dict(given_[:1])).items())
    pairs = [(name, value.encode("utf-8", "surrogatepass")) for name, value in query]
    response = tab.client.get(f"/data/plugin/fp8/{route}?{urlencode(pairs)}")
    assert response.status_code in (200, 400, 403, 404, 409), response.text
    if response.status_code != 200:
        ((name, sentence),) = json.loads(response.text).items()
        assert name == "error" and 10 < len(sentence) < 600 and "Traceback" not in sentence
    elif route not in ("frames",):
        json.loads(response.text, parse_constant=lambda name: pytest.fail(name))


def test_too_many_steps_at_once(tmp_path: Path) -> None:
    record = start(tmp_path)
    for step in range(130):
        record.record(sample(step, [{}]))
    record.close()
    tab = Tab(tmp_path)
    status, why = tab.error("frames", run=".", metric="mse", from_=0, to=200)
    assert status == 400 and "130 sampled steps" in why and "128" in why
    assert len(tab.frames(run=".", metric="mse", from_=2, to=200)[0]["steps"]) == 128


def damage(part: Path, at: float) -> None:
    content = bytearray(part.read_bytes())
    content[int(at * len(content))] ^= 1
    part.write_bytes(content)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of a merged part of many blocks, which are checked one by one, and a small one."""
    random = np.random.default_rng(2)
    record = start(tmp_path_factory.mktemp("large") / "run")
    layers = [f"decoder.layers.{i}.mlp.{random.bytes(40).hex()}" for i in range(100)]
    for step in range(65):
        rows = [{"layer": layer} | {name: float(random.normal()) for name in METRICS} for layer in layers]
        record.record(sample(step, rows))
    record.close()
    return Path(record.storage.path(""))


@pytest.mark.parametrize("at", [0.0, 0.15, 0.4, 0.6, 0.9, 0.999])
def test_what_is_damaged_is_left_out_and_told_of(tmp_path: Path, large: Path, at: float) -> None:
    run = shutil.copytree(large, tmp_path / "run")
    damage(max((run / "metrics").iterdir(), key=lambda part: part.stat().st_size), at)
    tab = Tab(tmp_path)
    lost = False
    for metric in METRICS[::3]:
        header, values = tab.frames(run="run", metric=metric, from_=0, to=64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = expected_frames(large, metric, 0, 64)
            there = read_table(run, "metrics", ["step", "layer", "role", metric])
        keys = list(zip(header["layer"], header["role"], strict=True))
        found = {(s, *k): values[i, j] for i, s in enumerate(header["steps"]) for j, k in enumerate(keys)}
        found = {key: value for key, value in found.items() if not np.isnan(value)}
        assert found == {key: whole[key] for key in there.select("step", "layer", "role").rows()}
        extent = tab.json("extent", run="run", metric=metric)
        assert (extent["low"], extent["high"]) == (there[metric].min(), there[metric].max())
        lost = lost or len(found) < len(whole)
    told = any("left out" in note and "damaged" in note for note in tab.json("run", run="run")["notes"])
    assert told == lost
    layer = tab.json("run", run="run")["tensors"]["layer"][0]
    assert tab.get("timeline", run="run", layer=layer, role="input", metrics="mse,amax").status_code == 200
    assert tab.get("others", run="run", step=30).status_code == 200
    assert tab.get("histogram", run="run", layer=FC1, role="input", step=30).status_code in (404, 409)


def test_a_record_whose_parts_are_all_damaged_is_unreadable(tmp_path: Path, logdir: Path) -> None:
    run = shutil.copytree(logdir / "odd/fp8_debug", tmp_path / "run")
    for part in (run / "metrics").iterdir():
        part.write_bytes(part.read_bytes()[:100])
    tab = Tab(tmp_path)
    (about,) = tab.json("runs")["runs"]
    assert about["state"] == "unreadable" and "damaged" in about["why"]
    assert any("left out" in note for note in tab.json("run", run="run")["notes"])


def test_a_part_that_was_not_finished_is_no_part(tmp_path: Path, logdir: Path) -> None:
    run = shutil.copytree(logdir / "counted/fp8_debug", tmp_path / "run")
    part = next((run / "metrics").iterdir())
    part.rename(part.with_name(part.name + ".0123456789abcdef.part"))
    tab = Tab(tmp_path)
    assert tab.json("runs")["runs"][0]["samples"] == 2
    assert len(tab.json("run", run="run")["steps"]) == 2


def test_a_fingerprint_that_was_deleted_fails_no_list(tmp_path: Path, logdir: Path) -> None:
    shutil.copytree(logdir / "counted", tmp_path / "whole")
    run = shutil.copytree(logdir / "odd/fp8_debug", tmp_path / "run")
    (run / "attempt-1.json").unlink()
    found = {about["name"]: about for about in Tab(tmp_path).json("runs")["runs"]}
    assert {name: about["samples"] for name, about in found.items()} == {"run": 71, "whole": 3}
    assert found["run"]["state"] == "growing" and found["run"]["why"] is None


def test_the_state_and_tensors_are_those_of_the_latest_attempt(tmp_path: Path) -> None:
    """Which began anew at an earlier step than the one before had come to."""
    for steps, layer in (((0, 10, 20), FC1), ((0,), FC2)):
        record = start(tmp_path / "run")
        for step in steps:
            record.record(sample(step, [{"layer": layer}]))
        record.close()
    for old in (tmp_path / "run").rglob("attempt-0*"):
        os.utime(old, (1e9, 1e9))
    tab = Tab(tmp_path)
    (about,) = tab.json("runs")["runs"]
    newest = next((tmp_path / "run/metrics").glob("attempt-1-*"))
    assert (about["state"], about["last"], about["updated"]) == ("growing", 20, newest.stat().st_mtime)
    assert tab.json("run", run="run")["tensors"]["layer"] == [FC2]


def test_a_record_of_another_schema_says_so(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    (tmp_path / "run/attempt-0.json").write_text('{"schema_version": 99}')
    tab = Tab(tmp_path)
    (about,) = tab.json("runs")["runs"]
    assert about["state"] == "unreadable" and "schema version 99" in about["why"]
    status, why = tab.error("run", run="run")
    assert status == 409 and "schema version 99" in why


def test_a_record_without_samples_is_empty(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/attempt-0.json").write_text("[]")  # no fingerprint, no tables
    tab = Tab(tmp_path)
    assert [(run["name"], run["state"], run["first"]) for run in tab.json("runs")["runs"]] == [
        ("odd", "empty", None),
        ("run", "empty", None),
    ]
    assert tab.json("run", run="run")["notes"] == ["Nothing was sampled yet: the record has no metrics."]
    assert any("not a fingerprint" in note for note in tab.json("run", run="odd")["notes"])
    assert tab.json("loss", run="run")["step"] == []
    assert tab.error("others", run="run", step=0)[0] == 404
    assert tab.frames(run="run", metric="mse", from_=0, to=9)[0]["steps"] == []


def test_a_record_that_grows_is_read_whole_at_each_look(tmp_path: Path) -> None:
    record = start(tmp_path / "run")
    record.record(sample(0, [{"mse": 0.0}]))
    tab = Tab(tmp_path)
    assert tab.json("runs")["runs"][0]["state"] == "growing"
    stop, seen = threading.Event(), list[int]()

    def look() -> None:
        while not stop.is_set():
            header, values = tab.frames(run="run", metric="mse", from_=0, to=90)
            assert header["steps"] == list(range(len(header["steps"]))) and values[:, 0].tolist() == header["steps"]
            seen.append(len(header["steps"]))

    faults: list[Any] = []

    def guarded() -> None:
        try:
            look()
        except AssertionError as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 70):
        record.record(sample(step, [{"mse": float(step)}]))
    record.close()
    wait_until(lambda: faults or 70 in seen)
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults and max(seen) == 70

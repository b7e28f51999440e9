"""What the tab answers of records that are damaged, unfinished, empty or growing."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import wait_until
from samples import sample
from tab import FC1, FC2, Tab, expected_frames, start

from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.reader import read_table_rows


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
        rows = [{"layer": layer} | {name: float(random.uniform()) for name in METRICS} for layer in layers]
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
            there = read_table_rows(run, "metrics", ["step", "layer", "role", metric])
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


def test_a_record_whose_parts_are_all_damaged_is_unreadable(tmp_path: Path, two_runs: Path) -> None:
    run = shutil.copytree(two_runs / "odd/fp8_debug", tmp_path / "run")
    for part in (run / "metrics").iterdir():
        part.write_bytes(part.read_bytes()[:100])
    tab = Tab(tmp_path)
    (about,) = tab.json("runs")["runs"]
    assert about["state"] == "unreadable" and "damaged" in about["why"]
    assert any("left out" in note for note in tab.json("run", run="run")["notes"])


def test_a_part_that_was_not_finished_is_no_part(tmp_path: Path, two_runs: Path) -> None:
    run = shutil.copytree(two_runs / "counted/fp8_debug", tmp_path / "run")
    part = next((run / "metrics").iterdir())
    part.rename(part.with_name(part.name + ".0123456789abcdef.part"))
    tab = Tab(tmp_path)
    assert tab.json("runs")["runs"][0]["samples"] == 2
    assert len(tab.json("run", run="run")["steps"]) == 2


def test_a_fingerprint_that_was_deleted_fails_no_list(tmp_path: Path, two_runs: Path) -> None:
    shutil.copytree(two_runs / "counted", tmp_path / "whole")
    run = shutil.copytree(two_runs / "odd/fp8_debug", tmp_path / "run", copy_function=shutil.copyfile)  # written just now
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
    assert tab.json("run", run="run")["notes"] == ["The record has no metrics yet, because no step was sampled."]
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

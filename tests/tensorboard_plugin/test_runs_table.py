"""The table of all runs: what its routes answer, what is kept of verdicts, and what a real Chromium shows of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Page, expect
from processes import wait_until
from samples import sample
from shown import cells, table, taken_away
from tab import FC1, Tab, start
from tensorboard.data.provider import Run
from verdict_records import HOSTILE

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.tensorboard_plugin import cache, runs_table
from nemo_fp8_debug.tensorboard_plugin.runs_table import sort_names_by_color

Open = Callable[..., Page]
MANY = 50


def write_run(folder: Path, loss: float, steps: int = 12) -> Path:
    record = start(folder)
    for step in range(steps):
        record.record(sample(10 * step, [{"layer": FC1, "scale_source": "engine"}]))
        record.record_steps({10 * step + i: {"loss": loss + 0.001 * i} for i in range(10)})
    record.close()
    return folder


def say_ended(run: Path, ended: float | None) -> None:
    status = {"step": 0, "time": time.time()} | ({} if ended is None else {"ended": ended})
    (run / "status.json").write_text(json.dumps(status))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    for name, loss in (("baseline", 2.0), ("run", 2.5)):
        write_run(tmp_path / name, loss)
    return tmp_path


def waited(tab: Tab, **parameters: Any) -> Any:
    answers: list[Any] = []
    wait_until(lambda: answers.append(tab.json("headline", **parameters)) or answers[-1]["state"] != "working")
    assert answers[-1]["state"] == "done", answers[-1]
    return answers[-1]["result"]


def test_rows_of_fifty_runs_tell_recipe_and_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "run-00", 2.0)
    for i in range(1, MANY):
        shutil.copytree(tmp_path / "run-00", tmp_path / f"run-{i:02}")
    record = start(tmp_path / "run-07")
    record.record_steps({500: {"loss": float("nan")}, 501: {"lr": 1e-3}})
    record.close()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/attempt-0.json").write_text(json.dumps({"schema_version": 99}))
    tab = Tab(tmp_path)
    told = tab.json("rows")
    assert told["is_complete"] and list(told["rows"]) == [run["name"] for run in tab.json("runs")["runs"]]
    assert len(told["rows"]) == MANY + 1 and "schema version 99" in told["rows"].pop("damaged")["why"]
    last = read_table_rows(tmp_path / "run-00", "steps")[-1]
    expected = {"recipe": "delayed-hybrid", "is_quantized": True, "headline": None}
    for name, row in told["rows"].items():
        loss = (
            {"loss": None, "loss_step": 500} if name == "run-07" else {"loss": last["loss"][0], "loss_step": last["step"][0]}
        )
        assert row == expected | loss | {"version": row["version"]}


def test_rows_for_which_there_was_no_time_come_when_asked_again(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(pair / "third", 2.0)
    monkeypatch.setattr(runs_table, "_PATIENCE", 0.0)
    tab = Tab(pair)
    answers = [tab.json("rows", baseline="baseline") for _ in range(3)]
    assert [(list(answer["rows"]), answer["is_complete"]) for answer in answers] == [
        (["baseline"], False),
        (["baseline", "run"], False),
        (["baseline", "run", "third"], True),
    ]


def test_a_run_has_ended_when_it_says_so_and_grows_again_when_it_is_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2.0)

    def state() -> str:
        (about,) = Tab(tmp_path).json("runs")["runs"]
        return str(about["state"])

    assert state() == "growing"  # as old as a moment
    say_ended(run, time.time())
    assert state() == "ended"
    say_ended(run, None)
    assert state() == "growing"
    for damaged in ("[" * 100_000, "[]", '{"ended": "yes"}', ""):
        (run / "status.json").write_text(damaged)
        assert state() == "growing"
    say_ended(run, time.time() - 60)
    start(run).close()  # resumed, and nothing sampled yet
    assert state() == "growing"
    say_ended(run, time.time() + 60)
    assert state() == "ended"


def test_a_status_out_of_the_logdir_is_not_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "logdir/run", 2.0)
    (tmp_path / "status.json").write_text(json.dumps({"ended": time.time()}))
    (run / "status.json").symlink_to(tmp_path / "status.json")
    assert Tab(tmp_path / "logdir").json("runs")["runs"] == []


def test_a_headline_is_that_of_the_verdict_and_is_kept(
    pair: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = {path: path.read_bytes() for path in pair.rglob("*") if path.is_file()}
    told = waited(Tab(pair), run="run", baseline="baseline")
    expected = story(diagnose(pair / "run", pair / "baseline"))["headline"]
    assert told == json.loads(json.dumps(expected))

    again = Tab(pair)  # another TensorBoard
    assert again.json("headline", run="run", baseline="baseline") == {"state": "done", "result": told}
    assert again.json("rows", baseline="baseline")["rows"]["run"]["headline"] == told
    assert again.json("rows")["rows"]["run"]["headline"] is None
    assert {path: path.read_bytes() for path in pair.rglob("*") if path.is_file()} == before

    for content in ("", "{", '{"result": 1}', "[" * 100_000, '{"checksum": "0", "result": {"harm": "none"}}'):
        (file,) = (cache / "nemo_fp8_debug/verdicts").iterdir()
        whole = file.read_text()
        file.write_text(content)
        assert Tab(pair).json("rows", baseline="baseline")["rows"]["run"]["headline"] is None
        file.write_text(whole)
    assert waited(Tab(pair), run="run", baseline="baseline") == told

    write_run(pair / "run", 2.5, steps=1)  # it grows
    assert Tab(pair).json("rows", baseline="baseline")["rows"]["run"]["headline"] is None


def test_what_is_kept_depends_on_all_of_its_key_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST", 3)
    mine = cache.VerdictDiskCache(tmp_path / "verdicts")
    for i in range(5):
        mine.store_result({"package": "1", "records": [i]}, {"harm": i})
        os.utime(max((tmp_path / "verdicts").iterdir(), key=lambda path: path.stat().st_mtime_ns), (i, i))
    assert [mine.get_result({"package": "1", "records": [i]}) for i in range(5)] == [
        None,
        None,
        {"harm": 2},
        {"harm": 3},
        {"harm": 4},
    ]
    assert mine.get_result({"package": "2", "records": [4]}) is None
    assert len(list((tmp_path / "verdicts").iterdir())) == 3


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    mine = cache.VerdictDiskCache(tmp_path / "file" / "verdicts")
    mine.store_result({"a": 1}, {})
    assert mine.get_result({"a": 1}) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.find_cache_folder() == Path.home() / ".cache" / "nemo_fp8_debug"


class _Board:
    """Runs as TensorBoard's data provider tells them."""

    def __init__(self, **started: float | None) -> None:
        self._started = started

    def list_runs(self, ctx: Any, *, experiment_id: str) -> list[Run]:
        return [Run(name, name.replace("__", "/"), at) for name, at in self._started.items()]


def test_colors_are_in_the_order_of_tensorboard() -> None:
    board = _Board(late=3.0, none=None, also=None, b__version_0=2.0, early=1.0, foreign=0.0)
    names = ["also", "b", "early", "late", "none", "a-record-alone"]
    assert sort_names_by_color(names, board) == ["early", "b", "late", "also", "none", "a-record-alone"]
    assert sort_names_by_color(names, None) == sorted(names)


def column(page: Page, of: str) -> list[str]:
    found = table(page, "Verdicts against")
    headings = [re.split(r"[\n▴▾]", text)[0].strip() for text in found.locator("thead th").all_inner_texts()]
    return [row[headings.index(of)].split("\n")[0] for row in cells(found)]


def test_rows_are_there_at_once_and_can_be_sorted_filtered_pinned_and_made_the_baseline(
    frame: Open, logdir: Path, cache_folder: Path
) -> None:
    page = frame(view="runs", run="bad", baseline="baseline", reference="")
    names = sorted([HOSTILE, "again", "bad", "baseline", "reference"])
    page.locator("[data-run]").first.wait_for()
    assert column(page, "run") == names
    assert "✖" not in "".join(column(page, "verdict"))[: -len("✖ harmed")]  # verdicts come later
    expect(page.locator("#view")).to_contain_text("all are judged")
    told = {name: story(diagnose(logdir / name, logdir / "baseline"))["headline"] for name in ("again", "bad", "reference")}
    shown = dict(zip(names, zip(column(page, "cause"), column(page, "confidence"), strict=True), strict=True))
    for name, headline in told.items():
        assert shown[name] == (headline["cause"].replace("_", " "), headline["confidence"] or "-")
    assert shown["baseline"] == ("-", "-") and column(page, "recipe")[-1] == "not quantized"
    assert dict(zip(names, column(page, "state"), strict=True))["bad"] == "ended"

    found = table(page, "Verdicts against")
    found.get_by_role("button", name="gap").click()
    gaps = {name: headline["gap"]["percent"] for name, headline in told.items()}
    assert [name for name in column(page, "run") if name in gaps] == sorted(gaps, key=lambda name: -gaps[name])
    page.get_by_label("Pin reference").click()
    assert column(page, "run")[0] == "reference"
    page.locator("[data-picker=run-filter]").fill("^B|ref")
    assert sorted(column(page, "run")) == ["bad", "baseline", "reference"]
    assert sorted(row[1] for row in taken_away(page, found)[1:]) == ["bad", "baseline", "reference"]
    state = ("run_sort=-gap", "pinned=reference", "run_filter=^B|ref")
    page.wait_for_url(lambda url: all(part in unquote(url) for part in state))  # it is written a moment later
    page.locator("[data-picker=run-filter]").fill("(")
    expect(page.get_by_role("alert")).to_contain_text("Invalid regular expression")
    page.locator("[data-picker=run-filter]").fill("")

    page.get_by_role("button", name="reference as baseline").click()
    expect(page.locator("[data-part=baseline]")).to_have_value("reference")
    expect(page.locator("#view")).to_contain_text("Verdicts against reference")
    page.get_by_role("button", name="baseline as run", exact=True).click()
    expect(page.locator("[data-part=run]")).to_have_value("baseline")
    expect(page.locator("#view")).to_contain_text("all are judged")
    assert not page.evaluate("Boolean(window.hacked)") and list(cache_folder.iterdir())

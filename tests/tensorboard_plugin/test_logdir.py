"""Which records are found below a logdir, how they are named, and that nothing outside of it is read."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from processes import GUARD, wait_until
from samples import sample
from tab import Tab, start

from nemo_fp8_debug import RecordError
from nemo_fp8_debug.record.reader import find_record, read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage
from nemo_fp8_debug.tensorboard_plugin.records import logdir as logdir_module


def write_run(folder: Any, loss: float = 2.0) -> Any:
    record = start(folder)
    record.record(sample(0, [{}]))
    record.record_steps({0: {"loss": loss}})
    record.close()
    return folder


def names(tab: Tab) -> list[str]:
    return [run["name"] for run in tab.json("runs")["runs"]]


def refused(tab: Tab) -> dict[str, str]:
    return {entry["name"]: entry["why"] for entry in tab.json("runs")["refused"]}


def test_runs_are_named_by_their_folders(tmp_path: Path) -> None:
    for folder in ("baseline/fp8_debug", "a/b/fp8_debug", "plain", "plain/metrics/inner", "plain/again"):
        write_run(tmp_path / folder)
    assert names(Tab(tmp_path)) == ["a/b", "baseline", "plain", "plain/again"]
    assert names(Tab(tmp_path / "baseline")) == names(Tab(tmp_path / "baseline/fp8_debug")) == ["."]


def test_a_record_within_a_record_has_a_name_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "a", loss=1.0)
    write_run(tmp_path / "a/fp8_debug", loss=2.0)
    tab = Tab(tmp_path)
    assert {name: tab.json("loss", run=name)["loss"] for name in names(tab)} == {"a": [1.0], "a/fp8_debug": [2.0]}


def test_several_logdirs_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "x/fp8_debug", loss=1.0)
    write_run(tmp_path / "y/deep/run/fp8_debug", loss=2.0)
    write_run(tmp_path / "z", loss=3.0)
    tab = Tab(spec=f"one:{tmp_path}/x,two:{tmp_path}/y,{tmp_path}/z")
    assert names(tab) == [".", "one", "two/deep/run"]
    assert [tab.json("loss", run=name)["loss"] for name in names(tab)] == [[3.0], [1.0], [2.0]]
    assert tab.json("runs")["logdirs"] == [f"{tmp_path}/{folder}" for folder in "xyz"]


def test_a_remote_logdir_is_read(tmp_path: Path) -> None:
    address = f"memory://{uuid.uuid4().hex}/runs"
    write_run(f"{address}/baseline/fp8_debug", loss=1.5)
    tab = Tab(address)
    (about,) = tab.json("runs")["runs"]
    assert (about["name"], about["samples"], about["state"]) == ("baseline", 1, "growing")
    assert tab.json("loss", run="baseline")["loss"] == [1.5]
    assert tab.frames(run="baseline", metric="mse", from_=0, to=0)[1].tolist() == [[pytest.approx(1e-4)]]


def test_an_address_without_a_driver_is_named(tmp_path: Path) -> None:
    assert "install the driver" in refused(Tab("nosuchscheme://bucket/runs"))["nosuchscheme://bucket/runs"]


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    for logdir in (tmp_path / "later", tmp_path):
        assert Tab(logdir).json("runs")["runs"] == []
    status, why = Tab(tmp_path).error("run", run="baseline")
    assert status == 404 and "none yet" in why


def test_a_record_that_comes_later_is_found(tmp_path: Path) -> None:
    tab = Tab(tmp_path)
    assert names(tab) == []
    write_run(tmp_path / "baseline/fp8_debug")
    wait_until(lambda: names(tab) == ["baseline"])


def test_records_are_looked_for_before_a_browser_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logdir_module, "_PAUSE", GUARD)  # no other look
    write_run(tmp_path / "baseline/fp8_debug")
    tab = Tab(tmp_path)
    wait_until(lambda: all(thread.name != "fp8-logdir" for thread in threading.enumerate()))
    shutil.rmtree(tmp_path / "baseline")
    assert names(tab) == ["baseline"]


def test_links_out_of_the_logdir_are_not_followed(tmp_path: Path) -> None:
    logdir, outside = tmp_path / "logdir", write_run(tmp_path / "outside/fp8_debug")
    logdir.mkdir()
    write_run(logdir / "inside/fp8_debug")
    (logdir / "linked").symlink_to(tmp_path / "outside")
    (logdir / "also").symlink_to(logdir / "inside")
    (logdir / "loop").symlink_to(logdir)
    (logdir / "broken").symlink_to(tmp_path / "nothing")
    tab = Tab(logdir)
    assert names(tab) == ["inside"]
    assert list(refused(tab)) == ["linked"] and "--logdir_spec name:target" in refused(tab)["linked"]
    assert tab.error("run", run="linked")[0] == 404
    assert names(Tab(spec=f"out:{logdir}/linked")) == ["out"]
    assert outside.exists()


def test_commands_follow_a_link_that_is_named_and_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "outside/fp8_debug")
    links = tmp_path / "links"
    links.mkdir()
    (links / "linked").symlink_to(tmp_path / "outside")
    assert len(read_table_rows(find_record(links / "linked"), "steps")) == 1
    with pytest.raises(RecordError, match=re.escape(f"Links in it are not followed: name {links}/linked itself")):
        find_record(links)


@pytest.mark.parametrize("what", ["attempt-0.json", "metrics", "a part"])
def test_a_record_with_a_link_out_of_the_logdir_is_not_read(tmp_path: Path, what: str) -> None:
    logdir, secret = tmp_path / "logdir", write_run(tmp_path / "secret")
    run = write_run(logdir / "run")
    name = f"metrics/{next((run / 'metrics').iterdir()).name}" if what == "a part" else what
    source = next((secret / "metrics").iterdir()) if what == "a part" else secret / name
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    (run / name).symlink_to(source)
    tab = Tab(logdir)
    assert names(tab) == [] and "link out of the logdir" in refused(tab)["run"]
    for named in (run, logdir):  # commands treat links as the tab does
        with pytest.raises(RecordError, match=f"of the record {run} is a link out of {named}; replace the link"):
            find_record(named)
    link = tmp_path / "link"
    link.symlink_to(secret)
    assert find_record(link) == FolderStorage(link)
    assert tab.error("frames", run="run", metric="mse", from_=0, to=9)[0] == 404


def test_a_record_that_is_swapped_for_a_link_is_not_read(tmp_path: Path) -> None:
    logdir, secret = tmp_path / "logdir", write_run(tmp_path / "secret", loss=1.0)
    run = write_run(logdir / "a/run")
    tab = Tab(logdir)
    assert tab.json("loss", run="a/run")["loss"] == [2.0]
    shutil.rmtree(run)
    run.symlink_to(secret)
    status, why = tab.error("fingerprints", a="a/run")
    assert status == 404 and "A link has replaced" in why
    assert [about["state"] for about in tab.json("runs")["runs"]] in (["unreadable"], [])


@pytest.mark.parametrize("what", ["attempt-0.json", "attempt-1.json", "a part", "a link"])
def test_pipes_and_sockets_are_passed_over(tmp_path: Path, what: str) -> None:
    """Who opens a pipe waits for ever."""
    write_run(tmp_path / "baseline")
    part = "attempt-0-step-00000009-00000000.parquet"
    in_a_record = what in ("attempt-1.json", "a part")
    os.mkfifo(tmp_path / "pipe")
    for name, make in (("pipe", os.mkfifo), ("socket", _bind)):
        run = tmp_path / f"{name} here"
        if in_a_record:
            write_run(run)
        (run / "metrics").mkdir(parents=True, exist_ok=True)
        odd = {"a part": run / "metrics" / part, "a link": run / "attempt-0.json"}.get(what, run / what)
        if what == "a link":
            odd.symlink_to(tmp_path / "pipe")
        else:
            make(odd)
    tab = Tab(tmp_path)
    records = ["baseline", "pipe here", "socket here"] if in_a_record else ["baseline"]
    assert names(tab) == records
    for name in records:
        assert tab.json("run", run=name)["steps"] == [0]
        assert tab.json("extent", run=name, metric="mse")["low"] == pytest.approx(1e-4)


def _bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address of a socket is no longer than 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc", "logdir/../../outside", "..", "run/../run", "./run", "run/", "RUN", "%2e%2e/outside", ""]
)
def test_no_path_comes_from_a_parameter(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "outside/fp8_debug")
    write_run(tmp_path / "logdir/run/fp8_debug")
    tab = Tab(tmp_path / "logdir")
    for route, more in (("run", {}), ("loss", {}), ("others", {"step": 0})):
        assert tab.error(route, run=name, **more)[0] in (400, 404)
    assert tab.error("fingerprints", a=name)[0] in (400, 404)
    assert tab.error("verdict", run=name)[0] in (400, 404)


def test_hostile_names_are_names(tmp_path: Path) -> None:
    odd = ["<img src=x onerror=alert(1)>", "new\nline", "a:b,c", "ünï", "%41", "back\\slash", "x y&z=1#p"]
    for name in odd:
        write_run(tmp_path / name)
    write_run(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    tab = Tab(tmp_path)
    assert names(tab) == sorted(odd)
    assert all(tab.json("run", run=name)["run"] == name for name in odd)
    assert "UTF-8" in refused(tab)["\\udcff"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "closed").mkdir(mode=0)
    tab = Tab(tmp_path)
    assert names(tab) == ["run"] and "permission" in refused(tab)["closed"]


def test_a_logdir_of_many_files_does_not_stall_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look goes on in the background: here it hangs until requests were answered."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b/hangs")
    listed, answered = FolderStorage.list_entries, threading.Event()

    def slow(self: FolderStorage, folder: str = "") -> Any:
        if folder == "b":
            assert answered.wait(GUARD)
        return listed(self, folder)

    monkeypatch.setattr(logdir_module, "_FIRST", 0.1)
    monkeypatch.setattr(FolderStorage, "list_entries", slow)
    tab = Tab(tmp_path)
    wait_until(lambda: names(tab) == ["a"])
    answered.set()
    wait_until(lambda: names(tab) == ["a", "b/hangs"])
    assert tab.get("run", run="a").status_code == 200

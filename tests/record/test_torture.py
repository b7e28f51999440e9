"""Processes killed in mid-write, disks that fill up or go away, file systems that hang: what was recorded stays whole."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Condition
from typing import Any

import outages
import pytest
from outages import COMES_BACK, HANGS, LEAVES, STEPS, Hanging, train
from processes import GUARD, finished, run_script, wait_until
from samples import FINGERPRINT, sample

from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.monitor import recorder_queue
from nemo_fp8_debug.record import dump, merging
from nemo_fp8_debug.record.reader import find_record, read_fingerprint, read_table_rows
from nemo_fp8_debug.record.writer import RunRecordWriter

SCRIPT = Path(__file__).parents[2] / "scripts/validation/crash_recovery.py"
ALL = list(range(STEPS))
MISSED = list(range(LEAVES, COMES_BACK))


def test_killed_at_random_moments() -> None:
    told = run_script(SCRIPT, "--kills", "5", "--length", "40", "--seed", "3")
    summary = told.splitlines()[-1]
    assert summary.startswith("ok: 5 kills in ") and int(re.search(r"rows compared: (\d+)", summary)[1]) > 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    try:
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets no test mount a file system: {getattr(error, 'stderr', error)!r}")
    command = ["unshare", "-rm", sys.executable, outages.__file__, str(tmp_path_factory.mktemp("outages"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = finished(*command, *outages.OUTAGES, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {outcome["outage"]: outcome for outcome in found}


# Long tests rest on nemo_fp8_debug/record/*.py.
# Long tests rest on nemo_fp8_debug/monitor/recorder_queue.py.
@pytest.mark.long
class TestOutages:
    """In a process with mounts of its own."""

    @pytest.mark.parametrize("outage", outages.OUTAGES)
    def test_the_run_is_as_without_a_monitor(self, outcomes: dict[str, dict[str, Any]], outage: str) -> None:
        assert outcomes[outage]["undisturbed"]

    @pytest.mark.parametrize("outage", outages.OUTAGES)
    def test_one_warning_says_what_is_wrong(self, outcomes: dict[str, dict[str, Any]], outage: str) -> None:
        (warning,) = outcomes[outage]["warnings"]
        reason = {"full": "No space left", "read-only": "Read-only", "replaced": "Not a directory"}
        assert "cannot be written" in warning and reason.get(outage, "No such file or directory") in warning

    @pytest.mark.parametrize("outage", [name for name in outages.OUTAGES if name != "deleted"])
    def test_recording_goes_on_where_the_place_comes_back(self, outcomes: dict[str, dict[str, Any]], outage: str) -> None:
        outcome = outcomes[outage]
        assert outcome["metrics"] == outcome["histograms"] == outcome["steps"] == ALL
        assert outcome["dumps"] == [step for step in ALL if step not in MISSED]
        assert set(ALL) - set(outcome["events"]) <= set(MISSED)
        assert not outcome["leftovers"]
        status = outcome["status"]
        assert status["step"] == STEPS - 1
        assert list(status["dump"]["left_out"].values()) == [6 * len(MISSED)]  # one reason, not one a file
        assert status["dump"]["budget_bytes"] - status["dump"]["budget_left_bytes"] <= status["dump"]["bytes"]

    def test_a_deleted_record_is_begun_anew_in_the_end(self, outcomes: dict[str, dict[str, Any]]) -> None:
        outcome = outcomes["deleted"]
        assert outcome["metrics"] == outcome["histograms"] == outcome["steps"] == list(range(LEAVES, STEPS))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each wait of training for a write ended because that was done."""
    ended: list[bool] = []

    def wait(futures: list[Future[Any]], seconds: float) -> None:
        concurrent.futures.wait(futures, seconds)
        ended.append(futures[0].done())

    monkeypatch.setattr(recorder_queue, "wait", wait)
    monkeypatch.setattr(recorder_queue, "STUCK", GUARD)  # until something hangs
    yield ended


@pytest.fixture
def hanging(waits: list[bool]) -> Iterator[str]:
    Hanging.store.clear()
    Hanging.is_there.set()
    yield "hanging://server/run"
    Hanging.is_there.set()


class TestHangs:
    def test_the_run_goes_on_and_so_does_recording_when_it_ends(self, hanging: str, waits: list[bool]) -> None:
        def leave() -> None:
            Hanging.is_there.clear()
            recorder_queue.STUCK = 2.0

        def come_back() -> None:
            recorder_queue.STUCK = GUARD
            Hanging.is_there.set()
            wait_until(lambda: LEAVES in read_table_rows(hanging, "metrics")["step"])

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, weights = train(hanging, {LEAVES: leave, COMES_BACK: come_back})
        assert (losses, weights) == train(None)
        (warning,) = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
        assert "recording has been blocked" in warning
        assert waits.count(False) == 1  # training waited for the hang once, not at each step
        run = find_record(hanging)
        sampled = read_table_rows(run, "metrics")["step"].unique().to_list()
        assert set(sampled) >= {*range(LEAVES + 1), *range(COMES_BACK + 1, STEPS)}
        assert not set(sampled) & set(range(LEAVES + 1, COMES_BACK))
        assert read_table_rows(run, "steps")["step"].to_list() == ALL

    @pytest.fixture(scope="class")
    @classmethod
    def ended(cls) -> dict[str, list[Any]]:
        """What each process said whose record hangs to its end."""
        told = run_script("-c", "import outages; outages.hang_in_turn()")
        *found, statuses = map(json.loads, told.splitlines())
        assert statuses == [0] * len(HANGS)
        return dict(zip(HANGS, found, strict=True))

    @pytest.mark.long
    @pytest.mark.parametrize("begins", HANGS)
    def test_the_process_ends_though_the_hang_does_not(self, ended: dict[str, list[Any]], begins: str) -> None:
        undisturbed, *warned = ended[begins]
        assert undisturbed
        told = ["recording has been blocked" in warning for warning in warned if "cannot be written" not in warning]
        assert told == [True, False] and "Their data is lost" in warned[-1]

    def test_dumping_waits_for_room_once(self, hanging: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dump, "IN_FLIGHT", 1)  # a tensor at a time
        monkeypatch.setattr(dump, "PATIENCE", GUARD)  # until something hangs
        patience: list[float] = []

        class Room(Condition):
            def wait_for(self, there_is: Callable[[], bool], seconds: float | None = None) -> bool:
                found = super().wait_for(there_is, seconds)
                patience.extend([] if found else [seconds or 0.0])
                return found

        monkeypatch.setattr(dump, "Condition", Room)

        def leave() -> None:
            Hanging.is_there.clear()
            recorder_queue.STUCK, dump.PATIENCE = 2.0, 1.0

        def come_back() -> None:
            recorder_queue.STUCK, dump.PATIENCE = GUARD, GUARD
            Hanging.is_there.set()

        with pytest.warns(FP8DebugWarning, match="recording has been blocked"):
            done = train(hanging, {LEAVES: leave, COMES_BACK: come_back})
        assert done == train(None)
        assert patience.count(1.0) == 1 and set(patience) == {0.0, 1.0}  # not a second for each of the six tensors


class TestTwoAtOnce:
    def test_each_start_gets_an_attempt_of_its_own(self, tmp_path: Path) -> None:
        barrier, records = threading.Barrier(8), [RunRecordWriter(tmp_path) for _ in range(8)]

        def start(record: RunRecordWriter) -> None:
            barrier.wait()
            record.open(FINGERPRINT)

        threads = [threading.Thread(target=start, args=[record]) for record in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(record.attempt for record in records) == list(range(8))

    @pytest.mark.long
    def test_two_runs_and_a_reader(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each tidies up what both left, while it is read: every row is there at every time, once."""
        monkeypatch.setattr(merging, "MERGED", 4)
        for _ in range(3):
            record_steps(tmp_path, 0, 50)
        spawn = multiprocessing.get_context("spawn")
        writers = [spawn.Process(target=record_steps, args=(tmp_path, 50, 300)) for _ in range(2)]
        for writer in writers:
            writer.start()
        readings = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while any(writer.is_alive() for writer in writers):
                readings.append(read_table_rows(tmp_path, "metrics")["step"].to_list())
            readings.append(read_table_rows(tmp_path, "metrics")["step"].to_list())
        assert [writer.exitcode for writer in writers] == [0, 0]
        assert all(steps == list(range(len(steps))) for steps in readings)
        assert [len(steps) for steps in readings] == sorted(map(len, readings)) and len(readings[-1]) == 300
        assert read_fingerprint(tmp_path)["attempt"] == 4


def record_steps(folder: Path, first: int, last: int) -> None:
    merging.MERGED = 4
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    for step in range(first, last):
        record.record(sample(step, [{"layer": "l"}]))
    record.close()

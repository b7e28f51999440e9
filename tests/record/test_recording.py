"""Which thread each recorder works in, what may wait there, and where it is written."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers import Samples
from processes import finished, run_script, wait_until
from torch import nn
from unclosed import ENDS

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.core.error_guard import ErrorGuard
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.core.waits import RECORDING, WaitTimes
from nemo_fp8_debug.monitor import delivery, recorder_queue
from nemo_fp8_debug.monitor.recorder_queue import RecorderQueue
from nemo_fp8_debug.record.dump import dumped_files
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage


class Threads(Samples):
    """Notes the thread of every call."""

    def __init__(self, in_callers_thread: bool) -> None:
        super().__init__()
        self.in_callers_thread = in_callers_thread
        self.threads: set[int] = set()

    def record(self, sample: Sample) -> None:
        super().record(sample)
        self.threads.add(threading.get_ident())

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        super().record_steps(steps)
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("in_callers_thread", [True, False])
def test_recorders_get_samples_and_steps_in_the_thread_they_ask_for(in_callers_thread: bool) -> None:
    before = threading.active_count()
    model, recorder = nn.Linear(4, 4), Threads(in_callers_thread)
    monitor = Monitor(model, recorders=[recorder], interval=2)
    for step in range(6):
        with monitor.step(step) as report:
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            report(loss=loss)
    monitor.close()
    assert list(recorder.samples) == [0, 2, 4]
    assert list(recorder.steps) == list(range(6))
    assert len(recorder.threads) == 1
    assert (threading.get_ident() in recorder.threads) == in_callers_thread
    assert threading.active_count() == before


def training_waits() -> bool:
    """Whether the training thread waits for an earlier sample."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_code is not RecorderQueue.deliver.__code__:
        frame = frame.f_back
    return frame is not None


class Slow(Samples):
    """Keeps training waiting for each of its first samples."""

    in_callers_thread = False

    def __init__(self, slow: int) -> None:
        super().__init__()
        self.slow = slow

    def record(self, sample: Sample) -> None:
        if len(self.samples) < self.slow:
            wait_until(training_waits)
            time.sleep(1.5 * recorder_queue.PATIENCE)
        super().record(sample)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_queue, "PATIENCE", 2.0)


def train_slowly(recorder: Slow) -> list[int]:
    """Six steps, all sampled; how many samples were recorded as each began."""
    model, begun = nn.Linear(4, 4), list[int]()
    monitor = Monitor(model, recorders=[recorder], interval=1)
    for step in range(6):
        with monitor.step(step) as report:
            begun.append(len(recorder.samples))
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            report(loss=loss)
    monitor.close()
    return begun


def test_training_waits_for_what_cannot_be_written_in_time_and_is_told(impatient: None) -> None:
    recorder = Slow(2)
    with pytest.warns(FP8DebugWarning, match=r"training waited \d\.\d s for an earlier sample") as told:
        begun = train_slowly(recorder)
    assert len(told) == 1
    assert begun == list(range(6))  # no more than one is held at a time
    assert list(recorder.samples) == list(recorder.steps) == list(range(6))


@pytest.mark.parametrize("slow, told", [(1, False), (2, True)])
def test_the_first_sample_may_take_its_time(
    impatient: None, slow: int, told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """It may have to compile, once a machine: a longer interval, which the message asks for, would not avoid it."""
    train_slowly(Slow(slow))
    assert [issubclass(w.category, FP8DebugWarning) for w in recwarn] == [True] * told


def test_waits_of_a_step_for_several_jobs_end_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_queue, "STUCK", 0.5)
    waits, errors = WaitTimes(), ErrorGuard("raise")
    recording = RecorderQueue([Samples()], {}, errors.guard, waits)
    for _ in range(4):
        recording.submit_job(lambda: time.sleep(0.4))
    with pytest.warns(FP8DebugWarning, match="recording has been blocked"):
        recording.deliver(wait=True)
    assert recording.stuck
    assert waits.seconds[RECORDING] < 4 * 0.4
    recording.close()
    assert recording.closed and not recording.stuck


def test_a_step_may_dump_more_tensors_than_may_wait_behind_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_queue, "WAITING", 4)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).bfloat16()
    monitor = Monitor(model, tmp_path, interval=1, dump=["*"], dump_min_free_bytes=0, table_rows=0, on_error="warn")
    for step in range(3):
        with monitor.step(step):
            model(torch.randn(2, 4).bfloat16()).sum().backward()
    monitor.close()
    assert len(list(dumped_files(FolderStorage(tmp_path)))) == 3 * 3 * 8


def test_the_folder_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may change its own folder; ~ is what a shell makes of it, for all that is written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("started", "home", "elsewhere"):
        (tmp_path / folder).mkdir()
    for output, at in (("run", "started/run"), ("~/run", "home/run")):
        monkeypatch.chdir(tmp_path / "started")
        model = nn.Linear(4, 4).bfloat16()
        monitor = Monitor(model, output, interval=1, dump=["*"], dump_min_free_bytes=0, table_rows=0)
        for step in range(3):
            with monitor.step(step) as report:
                loss = model(torch.randn(2, 4).bfloat16()).sum()
                loss.backward()
                report(loss=loss)
            monkeypatch.chdir(tmp_path / "elsewhere")
        monitor.close()
        assert len(read_table_rows(tmp_path / at, "metrics")) == 9
        assert len(list(dumped_files(FolderStorage(tmp_path / at)))) == 9
        (events,) = (tmp_path / at).glob("events*")
        assert events.stat().st_size > 1000
    assert not list((tmp_path / "elsewhere").iterdir())
    assert [p.name for p in (tmp_path / "started").iterdir()] == ["run"]


@pytest.fixture(scope="module")
def unclosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unclosed")
    assert json.loads(run_script(Path(__file__).with_name("unclosed.py"), folder)) == list(ENDS.values())
    return folder


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_without_closing_loses_nothing(unclosed: Path, end: str) -> None:
    assert read_table_rows(unclosed / end, "metrics")["step"].unique().to_list() == [0, 5]
    assert read_table_rows(unclosed / end, "steps")["step"].to_list() == list(range(8))


def test_losses_of_a_run_that_is_killed_are_recorded_up_to_a_while_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SECONDS_HELD", 0.0)
    model = nn.Linear(4, 4)
    monitor = Monitor(model, tmp_path, interval=100, table_rows=0)
    for step in range(5):
        with monitor.step(step) as report:
            report(loss=model(torch.ones(2, 4)).sum())
    monitor.flush()
    assert read_table_rows(tmp_path, "steps")["step"].to_list() == list(range(5))
    monitor.close()


FORKED = """
import os, sys, time, torch
from nemo_fp8_debug import Monitor
model = torch.nn.Linear(4, 4)
monitor = Monitor(model, sys.argv[1], interval=1, table_rows=0)
with monitor.step(0) as report:
    report(loss=model(torch.ones(2, 4)).sum())
child = os.fork()
if not child:
    with monitor.step(1) as report:
        report(loss=0.0)
    assert monitor.closed
    sys.exit(7)
began = time.monotonic()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 7 and time.monotonic() - began < 20, (code, time.monotonic() - began)
with monitor.step(1) as report:
    report(loss=model(torch.ones(2, 4)).sum())
"""


def test_a_forked_process_leaves_the_record_to_its_parent_and_ends_at_once(tmp_path: Path) -> None:
    done = finished(sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_table_rows(tmp_path, "steps")["step"].to_list() == [0, 1]


def test_a_closed_monitor_holds_no_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = Monitor(model, tmp_path, interval=1, table_rows=0, output_rows=2, verify_rows=2, states=["update"])
    with monitor.step(0) as report:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        report(loss=loss)
    monitor.close()
    seen, weight = weakref.ref(model), weakref.ref(model[0].weight)
    del model, loss, report
    gc.collect()
    assert seen() is None and weight() is None
    assert monitor.closed and not monitor.gemms and monitor.fingerprint
    monitor.flush()


def test_a_monitor_that_nobody_holds_is_freed() -> None:
    monitor = Monitor(nn.Linear(4, 4), recorders=[Samples()])
    seen = weakref.ref(monitor)
    monitor.close()
    del monitor
    gc.collect()
    assert seen() is None

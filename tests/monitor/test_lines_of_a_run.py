"""The lines at a run's start and end: where its record is, and what was missed."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mistaken_runs import in_a_step, two_layers, warned

from nemo_fp8_debug import FP8DebugWarning, Monitor


class TestLinesOfARun:
    def test_the_folder_is_named_at_the_start_and_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert not warned(Path("a b"), interval=2, table_rows=1)
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first == f"nemo_fp8_debug: recording 2 GEMMs, every 2 steps, to {tmp_path}/a b"
        # On a busy machine training may have waited long enough for that to be told.
        assert re.sub("; training waited .*? s,.*?(?=\\. View)", "", last) == (
            f"nemo_fp8_debug: recorded 2 samples in {tmp_path}/a b. View: tensorboard --logdir '{tmp_path}/a b' "
            f"or nemo-fp8-debug diagnose '{tmp_path}/a b'"
        )

    def test_without_tables_there_are_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert not warned(tmp_path, table_rows=0)
        assert capsys.readouterr().out == ""

    def test_a_record_that_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from nemo_fp8_debug.record.writer import RunRecordWriter

        original = RunRecordWriter.record

        def record(self: RunRecordWriter, sample: Any) -> None:
            if sample.step > 0:
                raise OSError(5, "Input/output error")
            original(self, sample)

        monkeypatch.setattr(RunRecordWriter, "record", record)
        (message,) = warned(tmp_path, table_rows=1)
        assert "Input/output error" in message
        assert f"recorded only 1 of 4 samples (warnings say why) in {tmp_path}." in capsys.readouterr().out

    def test_no_step_was_sampled(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (message,) = warned(tmp_path, steps=range(1, 5), interval=100, table_rows=1)
        assert message.startswith("no step was sampled: the run took 4 steps (1 to 4), and every 100 steps is sampled")
        assert capsys.readouterr().out.endswith(f"recorded 0 samples in {tmp_path}.\n")

    def test_nothing_is_said_of_steps_where_nothing_records(self) -> None:
        monitor = Monitor(two_layers(), recorders=[])
        in_a_step(monitor, 1, lambda: torch.tensor(1.0))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            monitor.close()
        assert told == []

    def test_a_window_that_the_run_does_not_reach(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, first_step=50, last_step=60)
        assert "the run took 4 steps (0 to 3), and every step from step 50 up to step 60 is sampled" in message

    @pytest.mark.parametrize("steps", [(1, 99), (101, 199)])
    def test_a_run_that_knows_its_length_is_told_at_the_start(self, tmp_path: Path, steps: tuple[int, int]) -> None:
        monitor = Monitor(two_layers(), tmp_path, interval=100, table_rows=0)
        with pytest.warns(FP8DebugWarning, match=f"no step of this run will be sampled: it takes steps {steps[0]} to"):
            monitor.expect_steps(*steps)
        in_a_step(monitor, 1, lambda: torch.tensor(1.0))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            monitor.close()
        assert told == []  # it is said once

    @pytest.mark.parametrize("steps", [(0, 0), (1, 100), (100, 100), (150, 260)])
    def test_and_otherwise_not(self, tmp_path: Path, steps: tuple[int, int]) -> None:
        with warnings.catch_warnings(record=True) as told:
            Monitor(two_layers(), tmp_path, interval=100, table_rows=0).expect_steps(*steps)
        assert told == []

    def test_what_training_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from nemo_fp8_debug.record.writer import RunRecordWriter

        original = RunRecordWriter.record

        def record(self: RunRecordWriter, sample: Any) -> None:
            original(self, sample)
            time.sleep(1.2 if sample.step == 1 else 0.0)

        monkeypatch.setattr(RunRecordWriter, "record", record)
        warned(tmp_path, table_rows=1)
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.search(r"; training waited \d\.\d s, \d\.\d s of it at step 2, mainly for recording\. View: ", last)
        waited = json.loads((tmp_path / "status.json").read_text())["waited"]
        assert waited["seconds"] >= waited["longest"] >= waited["for"]["recording"] * 0.5 > 0.5
        assert waited["longest_at_step"] == 2

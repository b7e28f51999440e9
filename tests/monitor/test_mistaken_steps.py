"""Mistakes of a newcomer in the steps of the loop: each costs one warning, and the run goes on bit-identically."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mistaken_runs import in_a_step, sampled, trained, two_layers, warned

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.reader import read_table_rows

INVALID = [-1, "3", None, 2.5, True, 2**70, float("nan"), [3], torch.ones(2), torch.tensor(True), np.array([1, 2]), object()]


class TestSteps:
    @pytest.mark.parametrize("step", INVALID, ids=lambda step: type(step).__name__)
    def test_an_invalid_number_costs_its_samples_and_one_warning(self, tmp_path: Path, step: Any) -> None:
        (message,) = warned(tmp_path, steps=[0, step, step, 3])
        assert "is not sampled: the number of a step is a whole number, at least 0 and below 10**18" in message
        assert sampled(tmp_path) == [0, 3] == read_table_rows(tmp_path, "steps")["step"].to_list()

    def test_whole_numbers_of_other_types_are_taken(self, tmp_path: Path) -> None:
        assert not warned(tmp_path, steps=[np.int64(0), torch.tensor(1), torch.tensor([2]), 3.0, np.uint8(4), 10**18 - 1])
        assert sampled(tmp_path) == [0, 1, 2, 3, 4, 10**18 - 1]

    def test_a_step_that_goes_back_changes_nothing_that_is_recorded(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, steps=[0, 5, 5, 3, 6])
        assert message.startswith("step 5 is not sampled, because it follows step 5: step numbers must grow")
        assert sampled(tmp_path) == [0, 5, 6] == read_table_rows(tmp_path, "steps")["step"].to_list()

    def test_triggers_go_on_after_an_invalid_number(self, tmp_path: Path) -> None:
        options = {"interval": 100, "triggers": ["nonfinite"], "trigger_steps": 1}

        def loop(monitor: Monitor, step: Any, train: Callable[[], torch.Tensor]) -> None:
            with monitor.step(step) as report:
                report(loss=train() * (float("nan") if step == "2" else 1))

        (message,) = warned(tmp_path, loop, steps=[1, "2", 3, 4], **options)
        assert "step '2' is not sampled" in message
        assert sampled(tmp_path) == [3]

    def test_begun_and_never_ended(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            monitor.begin_step(step)
            train()

        (message,) = warned(tmp_path, loop)
        assert message.startswith("step 0 was begun and not ended, and its sample is dropped: call end_step")

    def test_the_last_one_begun_and_never_ended(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            monitor.begin_step(step)
            loss = train()
            if step < 3:
                monitor.end_step(loss=loss)

        (message,) = warned(tmp_path, loop)
        assert message.startswith("step 3 was begun and not ended")
        assert sampled(tmp_path) == [0, 1, 2]

    def test_ended_and_never_begun(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, lambda monitor, step, train: monitor.end_step(loss=train()))
        assert message.startswith("end_step was called without begin_step")

    def test_never_told_of_a_step(self, tmp_path: Path) -> None:
        (message,) = warned(tmp_path, lambda monitor, step, train: train())
        assert message.startswith("no step was reported: call begin_step and end_step around each training step")

    def test_a_run_that_fails_in_a_step_is_told_nothing_more(self, tmp_path: Path) -> None:
        with (
            warnings.catch_warnings(record=True) as told,
            pytest.raises(ZeroDivisionError),
            contextlib.closing(Monitor(two_layers(), tmp_path, table_rows=0)) as monitor,
        ):
            monitor.begin_step(0)
            raise ZeroDivisionError
        assert told == []

    def test_steps_that_the_loop_breaks_off_itself(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            with contextlib.suppress(ZeroDivisionError), monitor.step(step):
                train()
                if step == 1:
                    raise ZeroDivisionError

        assert not trained(tmp_path, loop)[1]
        assert sampled(tmp_path) == [0, 2, 3]

    def test_closed_twice_and_used_after_that(self, tmp_path: Path) -> None:
        def loop(monitor: Monitor, step: int, train: Callable[[], torch.Tensor]) -> None:
            in_a_step(monitor, step, train)
            monitor.close()

        (message,) = warned(tmp_path, loop)
        assert message == "the monitor is closed, so later steps are not recorded"
        assert sampled(tmp_path) == [0]

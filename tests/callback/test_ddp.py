"""The callback in a Lightning run of two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_fp8_debug.record.dump import dumped_files
from nemo_fp8_debug.record.reader import find_run, read_table


def run(folder: Path, how: str) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ddp_run.py")), str(folder), how]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("ddp")
    return folder, {how: run(folder / how, how) for how in ("none", "watched")}


def test_losses_and_weights_are_bit_identical(runs: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    assert len(runs[1]["none"][0]["losses"]) == 40
    assert runs[1]["watched"] == runs[1]["none"]


def test_both_ranks_dump_at_the_steps_that_the_trigger_chose(runs: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    record = find_run(runs[0] / "watched")
    assert read_table(record, "figures")["step"].unique().to_list() == [0, 10, 20, 24, 25, 30]
    assert {(step, rank) for _, step, rank, _ in dumped_files(record)} == {(s, r) for s in (0, 10, 20, 30) for r in (0, 1)}
    assert len(list((runs[0] / "watched").rglob("attempt-*.json"))) == 1
    assert read_table(record, "steps")["grad_multiplier"].drop_nulls().to_list() == [1.0] * 6


def test_accumulated_batches_divide_gradients(tmp_path: Path) -> None:
    run(tmp_path / "accumulated", "accumulated")
    record = find_run(tmp_path / "accumulated")
    assert read_table(record, "steps")["grad_multiplier"].to_list() == [0.25, *[None] * 9]
    figures = read_table(record, "figures").filter(role="grad_output")
    assert figures["true_amax"].to_list() == [4 * amax for amax in figures["amax"]]


def test_a_record_that_cannot_be_written_stops_both_ranks_before_the_first_step(tmp_path: Path) -> None:
    for rank in run(tmp_path / "refused", "refused"):
        assert "the run record cannot be written to /proc/nothing" in rank["refused"]
        assert rank["losses"] == []

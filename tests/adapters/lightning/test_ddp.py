"""The callback in a Lightning run of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_script

from nemo_fp8_debug.record.dump import dumped_files
from nemo_fp8_debug.record.reader import find_record, read_table_rows

RUNS = ("none", "watched", "accumulated", "refused")
Runs = tuple[Path, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of all runs, and what each rank found in each."""
    folder = tmp_path_factory.mktemp("ddp")
    for how in RUNS:
        (folder / how).mkdir()
    run_script(Path(__file__).with_name("ddp_run.py"), folder, MASTER_ADDR="127.0.0.1")
    return folder, {how: [json.loads((folder / how / f"rank-{r}.json").read_text()) for r in range(2)] for how in RUNS}


def test_losses_and_weights_are_bit_identical(runs: Runs) -> None:
    assert len(runs[1]["none"][0]["losses"]) == 40
    assert runs[1]["watched"] == runs[1]["none"]


def test_both_ranks_dump_at_the_steps_that_the_trigger_chose(runs: Runs) -> None:
    record = find_record(runs[0] / "watched")
    assert read_table_rows(record, "metrics")["step"].unique().to_list() == [0, 10, 20, 24, 25, 30]
    assert {(step, rank) for _, step, rank, _ in dumped_files(record)} == {(s, r) for s in (0, 10, 20, 30) for r in (0, 1)}
    assert len(list((runs[0] / "watched").rglob("attempt-*.json"))) == 1
    assert read_table_rows(record, "steps")["grad_scale"].drop_nulls().to_list() == [1.0] * 6


def test_accumulated_batches_divide_gradients(runs: Runs) -> None:
    record = find_record(runs[0] / "accumulated")
    assert read_table_rows(record, "steps")["grad_scale"].to_list() == [0.25, *[None] * 9]
    metrics = read_table_rows(record, "metrics").filter(role="grad_output")
    assert metrics["unscaled_amax"].to_list() == [4 * amax for amax in metrics["amax"]]


def test_a_record_that_cannot_be_written_stops_both_ranks_before_the_first_step(runs: Runs) -> None:
    for rank in runs[1]["refused"]:
        assert "the run record cannot be written to /proc/nothing" in rank["refused"]
        assert rank["losses"] == []

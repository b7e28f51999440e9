"""What goes wrong on one of several ranks costs metrics and says so once: never a hang, an exit code or a bit of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty import FAULTS, RUNS
from processes import run_script

from nemo_fp8_debug.record.reader import find_record, read_table_rows

# Long tests rest on nemo_fp8_debug/distributed/*.py.
# Long tests rest on nemo_fp8_debug/monitor/*.py.
pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("faulty.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ranks of all runs ended by themselves, and well."""
    folder = tmp_path_factory.mktemp("faults")
    run_script(WORKER, folder)
    return folder


def found_by_ranks(folder: Path, run: str) -> Found:
    """What each rank found, by scenario."""
    return [json.loads((folder / run / f"rank-{rank}.json").read_text()) for rank in range(RUNS[run][0])]


@pytest.fixture(scope="module")
def runs(ended: Path) -> tuple[Path, Found]:
    return ended / "faults", found_by_ranks(ended, "faults")


def rows(folder: Path, scenario: str) -> dict[tuple[int, str, str], tuple[int, int]]:
    """(stats, missing) by step, layer and role."""
    columns = ["step", "layer", "role", "ranks", "ranks_missing"]
    table = read_table_rows(find_record(folder / scenario), "metrics", columns)
    return {(step, layer, role): (made, lost) for step, layer, role, made, lost in table.rows()}


def said(found: Found, scenario: str) -> list[tuple[int, str]]:
    """(rank, message)"""
    return [(rank, message) for rank, results in enumerate(found) for message in results[scenario]["warnings"]]


@pytest.mark.parametrize("scenario", FAULTS)
def test_losses_and_weights_are_bit_identical(runs: tuple[Path, Found], scenario: str) -> None:
    for rank in runs[1]:
        assert rank[scenario]["same"]
        assert len(rank[scenario]["losses"]) == 9


ACTIVATIONS = {(layer, role) for layer in ("0", "2") for role in ("input", "grad_output")}


@pytest.mark.parametrize(
    ("scenario", "lost_at"),
    [
        *(("breaks_off", [2]), ("attach_fails", [0, 2, 4, 6, 8]), ("a_hook_fails", [4]), ("hooks_are_lost", [4])),
        *(("opening_fails", [0, 2, 4, 6, 8]), ("operands_fail", [0, 2, 4, 6, 8])),
    ],
)
def test_rows_without_the_part_of_a_rank_say_so(runs: tuple[Path, Found], scenario: str, lost_at: list[int]) -> None:
    found = rows(runs[0], scenario)
    assert {step for step, *_ in found} == {0, 2, 4, 6, 8}
    for (step, layer, role), stats in found.items():
        if role == "weight":  # all ranks have the same one, and the first counts it
            assert stats == (1, 0)
        else:
            assert (layer, role) in ACTIVATIONS
            assert stats == ((2, 1) if step in lost_at else (3, 0))
    warned = [(rank, message) for rank, message in said(runs[1], scenario) if "measured without the parts" in message]
    assert [rank for rank, _ in warned] == [0]
    assert f"4 operands of step {lost_at[0]} are measured without the parts of some ranks" in warned[0][1]


@pytest.mark.parametrize(
    ("scenario", "stats"), [("no_gemm_on_0", 2), ("no_gemm_on_1", 2), ("two_monitors", 3), ("uneven_groups", 3)]
)
def test_what_is_no_fault_is_no_warning(runs: tuple[Path, Found], scenario: str, stats: int) -> None:
    assert said(runs[1], scenario) == []
    found = rows(runs[0], scenario)
    assert set(found.values()) == {(1, 0), (stats, 0)}
    assert {step for step, *_ in found} == {0, 2, 4, 6, 8}


def test_a_second_monitor_samples_its_own_steps(runs: tuple[Path, Found]) -> None:
    assert {step for step, *_ in rows(runs[0], "two_monitors_other")} == {0, 3, 6}


@pytest.mark.parametrize(
    ("scenario", "recorded"), [("is_blocked", [0, 2]), ("numbers_of_0_differ", []), ("numbers_of_1_differ", [])]
)
def test_ranks_that_came_apart_stop_with_one_message(runs: tuple[Path, Found], scenario: str, recorded: list[int]) -> None:
    messages = said(runs[1], scenario)
    assert len(messages) == 1
    assert messages[0][0] == 0  # which is the one that people read
    assert "the run goes on, and is no longer monitored" in messages[0][1]
    assert sorted({step for step, *_ in rows(runs[0], scenario)}) == recorded
    assert all(rank[scenario]["seconds"] < 60 for rank in runs[1])


def test_ranks_that_cannot_be_connected_stop_with_one_message(runs: tuple[Path, Found]) -> None:
    [(rank, message)] = said(runs[1], "no_group")
    assert rank == 1
    assert "the ranks cannot be connected, so operands are not observed: a fault from outside" in message


def test_a_monitor_that_one_rank_never_started_leaves_the_first_alone(runs: tuple[Path, Found]) -> None:
    [(_, message)] = said(runs[1], "never_started")
    assert "not all ranks have started a monitor within 3 s, so only the first rank is monitored" in message
    assert set(rows(runs[0], "never_started").values()) == {(1, 0)}


def test_ranks_that_would_not_meet_are_refused_before_the_first_step(runs: tuple[Path, Found]) -> None:
    for rank in runs[1]:
        assert "ranks differ in their options: rank " in rank["differing"]["refused"]


def test_a_record_that_hangs_costs_samples(runs: tuple[Path, Found]) -> None:
    [(rank, message)] = said(runs[1], "hanging")
    assert rank == 0
    assert "recording has been blocked for 1 s. The run goes on" in message
    assert {0, 2} <= {step for step, *_ in rows(runs[0], "hanging")} < {0, 2, 4, 6, 8}


@pytest.mark.parametrize(("how", "steps"), [("closed_late", 9), ("closed_by_one", 9), ("interrupted", 4)])
def test_processes_end_well_however_the_run_does(ended: Path, how: str, steps: int) -> None:
    """With a sample in flight as a rule: every step is one."""
    for rank in found_by_ranks(ended, how):
        assert len(rank[how]["losses"]) == steps
    found = rows(ended / how, how)
    assert {step for step, *_ in found} >= set(range(steps - 1))
    assert {missing for _, missing in found.values()} <= {0}


def test_a_group_of_one_rank_is_nobody_to_wait_for(ended: Path) -> None:
    [alone] = found_by_ranks(ended, "alone")
    assert alone["two_monitors"]["same"]
    assert set(rows(ended / "alone", "two_monitors").values()) == {(1, 0)}

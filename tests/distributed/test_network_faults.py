"""Hosts that are frozen or cut off, the store's too: training is held up once, one rank warns, and losses stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from network_cases import CASES, broken
from network_hosts import possible
from processes import run_script

SCRIPT = Path(__file__).parents[2] / "scripts/validation/network_faults.py"
#: two of its cases, of a monitor that promises fewer seconds; each takes half a minute, and results of all are committed
SOON = ("interface not named", "store's host frozen")


@pytest.mark.long
def test_faults_hold_training_up_no_longer_than_promised(tmp_path: Path) -> None:
    if why := possible():
        pytest.skip(why)
    results = tmp_path / "results.json"
    fault = ("--limit", "12", "--work", "10", "--lasts", "25")  # which no wait is mistaken for
    run_script(SCRIPT, "--output", str(results), *fault, "--cases", *SOON)
    found = json.loads(results.read_text())
    assert list(found["cases"]) == list(SOON)
    assert broken(found) == []
    assert any(rank["waits"] for rank in found["cases"]["store's host frozen"]["ranks"])


def test_the_results_of_faults_of_full_length_keep_what_is_promised() -> None:
    found = json.loads(SCRIPT.with_suffix(".json").read_text())
    assert (found["limit_s"], found["work_s"], found["lasts_s"]) == (60.0, 0.0, 100.0)
    assert set(found["cases"]) == set(CASES)
    assert broken(found) == []

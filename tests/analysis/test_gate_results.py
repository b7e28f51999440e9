"""What the committed results of `scripts/validation/gate_coverage.py` show, which docs/accuracy.md prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "scripts/validation/gate_coverage.json").read_text())


def test_they_are_of_enough_runs_and_series() -> None:
    assert RESULTS["clean runs"] >= 60 and RESULTS["series"] >= 2000


@pytest.mark.parametrize("batches", ["the same batches", "other batches"])
def test_the_interval_holds_the_gap_and_errors_are_rare(batches: str) -> None:
    found = RESULTS[batches]
    assert 93 <= found["interval holds the gap, %"] <= 97
    assert found["pass at or above the limit, %"] <= 5 and found["fail at or below the limit, %"] <= 5


def test_it_decides_where_batches_are_the_same() -> None:
    of_5000 = RESULTS["the same batches"]["by steps"]["5000"]
    assert of_5000["cannot tell half a point from the limit, %"] <= 10

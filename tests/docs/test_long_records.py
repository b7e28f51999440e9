"""What the docs say of long records is what was measured, and what was measured keeps what is promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "scripts" / "benchmarks" / "large_records.json").read_text())
CLUSTERS = json.loads((ROOT / "scripts" / "validation" / "clusters.json").read_text())
PAGE = (ROOT / "docs" / "compare.md").read_text()
SLOWER = json.loads((ROOT / "scripts" / "benchmarks" / "large_records_slower.json").read_text())
TASKS = ("compare", "diagnose", "diagnose alone")


@pytest.mark.parametrize("found", MEASURED, ids=lambda found: f"{found['rows'] / 1e6:.0f} million rows")
def test_a_row_of_the_table_is_what_was_measured(found: dict[str, object]) -> None:
    cells = [f"{found[task]['seconds']:.0f} s, {found[task]['gb']:.1f} GB" for task in TASKS]  # type: ignore[index]
    assert f"| {found['samples']} | {found['rows'] / 1e6:.0f} million | {' | '.join(cells)} |" in PAGE  # type: ignore[operator]


def test_the_longest_record_takes_no_more_than_is_promised() -> None:
    longest = max(MEASURED, key=lambda found: found["rows"])
    assert longest["rows"] > 130e6 and all(longest[task]["names_the_culprit"] for task in TASKS)
    assert all(longest[task]["gb"] < 3 and longest[task]["seconds"] < 180 for task in TASKS)
    tab = longest["tab"]
    assert tab["a tensor's course"] < 1 and tab["map of a step"] < 2 and tab["layers by steps"] < 5 and tab["gb"] < 3


def test_the_slower_machine_takes_what_the_page_says() -> None:
    of_rows = {round(found["rows"] / 1e6): found for found in SLOWER}
    text = " ".join(PAGE.split())
    for task in TASKS:
        found = of_rows[134][task]
        assert f"{found['seconds']:.0f} s, {found['gb']:.1f} GB" in text and found["names_the_culprit"]
        assert found["gb"] < 3 and found["seconds"] < 180
    least, most = (f(of_rows[10][task]["gb"] for task in TASKS) for f in (min, max))
    assert f"{least:.1f} to {most:.1f} GB" in text
    course = of_rows[134]["tab"]["a tensor's course"]
    assert f"takes {course:.1f} s there" in text


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_clusters_are_as_fast_or_slow_as_the_page_says(engine: str) -> None:
    assert f"{CLUSTERS[engine]['times_faster']:.1f} times" in PAGE

"""The page on diagnose says of models that the benchmark was not made with what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_injection.families import OTHERS
from fault_injection.judge import INTERVALS
from fault_injection.other_models import kept, summary

FOUND = list(kept())
PAGE = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()


@pytest.mark.parametrize("row", [*summary(FOUND)])
def test_a_row_of_the_table_is_what_was_measured(row: str) -> None:
    assert row in PAGE


def test_clean_runs_are_accused_as_rarely_as_the_page_says() -> None:
    clean = [one for one in FOUND if one.is_clean]
    assert {one.truth["family"] for one in clean} == {*OTHERS}
    assert {one.interval for one in clean} == {*INTERVALS}
    assert not [one for one in clean if one.harm in ("harmful", "likely")]
    accused = [(one.truth["family"], one.baseline, one.interval) for one in clean if one.accused]
    assert accused == [("roberta", "depth", 50)]
    assert "every 50th step one: X of a RoBERTa in NVFP4 beside a deeper one" in " ".join(PAGE.split())

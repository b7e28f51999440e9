"""The pages about `diagnose` show the rules, thresholds and counts that are in the code and beside the scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis_tables import PAGES, write_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_that_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write_tables(text) == text, f"scripts/diagnosis_tables.py writes {page.name} anew"

"""Pages: links lead somewhere, lines fit 120 columns, no section is there twice, no table is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "tests").glob("**/*.md")])


def prose(page: Path) -> Iterator[str]:
    fenced = False
    for line in page.read_text().split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def heading_ids(page: Path) -> set[str]:
    """As GitHub makes them."""
    titles = [line.lstrip("#").strip().lower() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, part = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not part or part in heading_ids(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit(page: Path) -> None:
    long = [line for line in prose(page) if len(line) > 120 and not line.lstrip().startswith(("|", "!["))]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_section_is_there_twice(page: Path) -> None:
    titles = [line for line in prose(page) if line.startswith("## ")]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_cut(page: Path) -> None:
    """A row behind a blank line begins a table, which needs a line of dashes next."""
    lines = ["", *prose(page), ""]
    begins = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert [lines[i] for i in begins if not re.fullmatch(r"\|[-:| ]+", lines[i + 1])] == []

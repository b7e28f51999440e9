"""What a page shows, to be held against what the command line says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page
from typer.testing import CliRunner

from nemo_fp8_debug.cli import app

_SHOWN_AS = {"input": "X", "weight": "W", "grad_output": "dY"}


def said(*arguments: object) -> Any:
    """What the command line prints as JSON."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def title(row: dict[str, Any]) -> str:
    return f"{_SHOWN_AS[row['role']]} of {row['layer']}"


def table(page: Page | Locator, caption: str) -> Locator:
    return page.locator("div.table", has=page.locator("caption", has_text=caption)).first


def cells(found: Locator) -> list[list[str]]:
    """The texts of a table's body, once it has some; an empty table is not shown."""
    found.locator("tbody tr").first.wait_for()
    return [row.locator("td").all_inner_texts() for row in found.locator("tbody tr").all()]


def taken_away(page: Page, found: Locator) -> list[list[str]]:
    """A table's CSV."""
    with page.expect_download() as download:
        found.get_by_role("button", name="as CSV").click()
    return list(csv.reader(io.StringIO(Path(download.value.path()).read_text(), newline="")))


def number(text: str) -> float | None:
    return float(text) if text not in ("", "-") else None

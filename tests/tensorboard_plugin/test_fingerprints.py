"""The Fingerprints view in a real Chromium, against what `compare` says of the same runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from shown import cells, said, table, taken_away
from verdict_records import HOSTILE

from nemo_fp8_debug.analysis.runs.settings import list_setting_differences
from nemo_fp8_debug.record.reader import find_record, read_fingerprint

Open = Callable[..., Page]
STATE = {"view": "fingerprints", "run": "bad", "baseline": "baseline", "reference": "reference"}


@pytest.mark.parametrize("part", ["baseline", "reference"])
def test_differences_come_first_and_are_those_of_compare(frame: Open, logdir: Path, part: str) -> None:
    expected = [
        [row["setting"], row["baseline"] or "-", row["run"] or "-", "affects precision" if row["telling"] else "differs"]
        for row in said("compare", logdir / "bad", "--baseline", logdir / part)["differences"]
    ]
    assert expected
    page = frame(**STATE, against=part)
    settings = table(page, "settings")
    assert cells(settings)[: len(expected)] == expected
    rest = cells(settings)[len(expected) :]
    assert len(rest) > 10 and all(row[1] == row[2] and row[3] == "" for row in rest)
    assert settings.locator("tr.telling").count() == sum(row[3] == "affects precision" for row in expected)


def test_differences_only_stays_in_the_address(frame: Open) -> None:
    page = frame(**STATE, against="reference")
    every = len(cells(table(page, "settings")))
    page.locator("[data-picker=differs]").check()
    expect(page.locator("tbody tr")).not_to_have_count(every)
    some = len(cells(table(page, "settings")))
    assert 0 < some < every
    page.wait_for_function("location.hash.includes('p.fp8.differs=1')")
    again = frame(**STATE, against="reference", differs=1)
    expect(again.locator("tbody tr")).to_have_count(some)
    assert again.locator("[data-picker=differs]").is_checked()
    assert taken_away(again, table(again, "settings"))[1:] == [
        ["" if text == "-" else text for text in row] for row in cells(table(again, "settings"))
    ]


def test_a_search_finds_settings_and_values(frame: Open) -> None:
    page = frame(**STATE)
    cells(table(page, "settings"))
    page.locator("[data-picker=setting]").fill("amax_history_len=4")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert cells(table(page, "settings"))[0][0] == "recipe.measured_against"
    page.locator("[data-picker=setting]").fill("no such thing")
    expect(page.get_by_text("No setting matches")).to_be_visible()


def test_one_run_alone_shows_its_fingerprint_as_text(frame: Open, logdir: Path) -> None:
    page = frame(view="fingerprints", run=HOSTILE, baseline="", reference="")
    settings = table(page, "settings")
    fingerprint = read_fingerprint(find_record(logdir / HOSTILE))
    assert fingerprint["model"]["class"] == HOSTILE
    expected = list_setting_differences({}, fingerprint).sort("setting").select("setting", "run").rows()
    assert sorted((row[0], row[1]) for row in cells(settings)) == expected
    assert page.locator("[data-picker=differs]").count() == 0
    assert page.locator("#view img").count() == 0 and not page.evaluate("window.hacked")

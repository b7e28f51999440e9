"""The distribution of a tensor, and what another scale or format would make of it, held against numerics."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from cast_records import CURRENT, DELAYED, FLOAT32, HOSTILE
from histogram_rows import SHOWN, Row, by_numerics
from playwright.sync_api import Page, expect

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.numerics.formats import FORMATS
from nemo_fp8_debug.record.reader import find_record, read_table_rows

STEP = 20
Shown = Callable[..., Page]


@pytest.fixture
def shown(casts_shown: Shown) -> Shown:
    def open_on(**state: object) -> Page:
        page = casts_shown(
            **{"view": "distribution", "run": DELAYED, "layer": "first", "role": "input", "step": STEP} | state
        )
        page.locator("[data-table=metrics]").wait_for()
        return page

    return open_on


def recorded(run: Path, table: str, layer: str = "first", role: str = "input", step: int = STEP) -> list[Row]:
    return read_table_rows(find_record(run), table, where={"step": step, "layer": layer, "role": role}).to_dicts()


def metrics_shown(page: Page, of: str) -> dict[str, float | None]:
    cells = {name: page.locator(f"[data-metric={name}][data-of='{of}']") for name in SHOWN}
    values = {name: cell.get_attribute("data-value") for name, cell in cells.items()}
    return {name: None if value is None else float(value) for name, value in values.items()}


def bars_taken_away(page: Page) -> list[dict[str, str]]:
    """The rows of the histogram's CSV."""
    with page.expect_download() as download:
        page.locator("figure button", has_text="CSV").click()
    return list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(), newline="")))


def address_of(page: Page) -> dict[str, str]:
    return {name.removeprefix("p.fp8."): values[0] for name, values in parse_qs(page.url.partition("#")[2]).items()}


_ADDRESS_HAS_FOLLOWED = """() => {
  const at = new URLSearchParams(location.hash.slice(1));
  const scale = Number(document.querySelector('output[data-try=effective]').dataset.value);
  const format = document.querySelector('[data-try=format]').value;
  const there = Math.fround(at.get('p.fp8.scale') / 2 ** (at.get('p.fp8.margin') ?? 0));
  return there === scale && (at.get('p.fp8.format') ?? 'e4m3') === format;
}"""


def check_tried(page: Page, rows: list[Row]) -> dict[str, str]:
    """What is shown as tried is what Python computes for the scale and the format in the address."""
    page.wait_for_function(_ADDRESS_HAS_FOLLOWED)
    state = address_of(page)
    scale, fmt = float(state["scale"]) / 2 ** int(state.get("margin", 0)), FORMATS[state.get("format", rows[0]["format"])]
    expected = by_numerics(rows, [scale] * len(rows), fmt)
    assert metrics_shown(page, "tried") == {name: pytest.approx(expected[name], rel=1e-12) for name in SHOWN}
    words = page.locator("figure [role=img]").get_attribute("aria-label") or ""
    assert f"{expected['underflow_pct']:g}" in words or str(expected["underflow_pct"]) in words
    return state


def test_what_was_in_use_shows_what_was_recorded(shown: Shown, casts: Path) -> None:
    page = shown()
    (row,) = recorded(casts / DELAYED, "metrics")
    assert row["underflow_pct"] > 10
    expected = {name: pytest.approx(row[name], rel=1e-9) for name in SHOWN}
    assert metrics_shown(page, "in use") == expected
    assert metrics_shown(page, "tried") == expected
    (histogram,) = recorded(casts / DELAYED, "histograms")
    words = page.locator("[data-words=values]").inner_text()
    assert f"{row['n']:,} finite values" in words and "no NaN, no infinities" in words
    bars = bars_taken_away(page)
    zeros = sum(count for storage, count in zip(histogram["bins"], histogram["counts"], strict=True) if storage == 0)
    assert sum(int(bar["values"]) for bar in bars) == sum(histogram["counts"]) - zeros


def test_keys_change_the_scale_and_the_metrics(shown: Shown, casts: Path) -> None:
    page, rows = shown(), recorded(casts / DELAYED, "histograms")
    before = metrics_shown(page, "tried")
    page.locator("input[data-try=scale]").focus()
    for _ in range(11):
        page.keyboard.press("ArrowRight")
    state = check_tried(page, rows)
    assert float(state["scale"]) == pytest.approx(rows[0]["scale"] * 2 ** (11 / 8), rel=1e-6)
    assert metrics_shown(page, "tried")["underflow_pct"] < (before["underflow_pct"] or 0)
    assert metrics_shown(page, "in use") == before
    page.locator("[data-try=in-use]").click()
    expect(page.locator("[data-metric=underflow_pct][data-of=tried]")).to_have_attribute(
        "data-value", str(before["underflow_pct"])
    )


@pytest.mark.parametrize("by", [260, -170])
def test_the_window_is_dragged(shown: Shown, casts: Path, by: int) -> None:
    page, rows = shown(), recorded(casts / DELAYED, "histograms")
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    box = page.locator("figure canvas").bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + by / 2, y, steps=3)
    page.mouse.move(x + by, y, steps=3)
    page.mouse.up()
    state = check_tried(page, rows)
    assert (float(state["scale"]) < rows[0]["scale"]) == (by > 0)  # further right is what larger values need


def test_formats_margins_and_current_scaling_are_tried(shown: Shown, casts: Path) -> None:
    page, rows = shown(scale=3.5), recorded(casts / DELAYED, "histograms")
    for name in ("e5m2", "e2m1", "e4m3"):
        page.locator("[data-try=format]").select_option(name)
        assert check_tried(page, rows).get("format") == name
    page.locator("[data-try=margin]").fill("-4")
    assert check_tried(page, rows)["margin"] == "-4"
    page.locator("[data-try=current]").click()
    page.wait_for_function("!location.hash.includes('margin')")
    (row,) = recorded(casts / DELAYED, "metrics")
    assert float(check_tried(page, rows)["scale"]) == row["scale_current"]


def test_a_link_restores_what_was_tried(shown: Shown, casts: Path) -> None:
    page = shown(scale=2.0**-3, format="e5m2", margin=1)
    check_tried(page, recorded(casts / DELAYED, "histograms"))
    assert float(page.locator("output[data-try=effective]").get_attribute("data-value") or 0) == 2.0**-4


def test_what_was_tried_stays_with_its_tensor(shown: Shown, casts: Path) -> None:
    tried = {"scale": 2.0**-3, "format": "e5m2", "margin": 1}
    page = shown()
    page.evaluate("hash => location.hash = hash", shown(layer="second", **tried).url.partition("#")[2])
    expect(page.locator("[data-words=values]")).to_contain_text("X of second")
    check_tried(page, recorded(casts / DELAYED, "histograms", layer="second"))
    page.go_back()
    expect(page.locator("[data-words=values]")).to_contain_text("X of first")
    assert metrics_shown(page, "tried") == metrics_shown(page, "in use")
    page.go_forward()
    expect(page.locator("[data-try=format]")).to_have_value("e5m2")
    check_tried(page, recorded(casts / DELAYED, "histograms", layer="second"))
    page.locator("[data-picker=tensor]").fill("W of second")
    page.locator("[data-picker=tensor]").press("Enter")
    expect(page.locator("[data-words=values]")).to_contain_text("W of second")
    assert metrics_shown(page, "tried") == metrics_shown(page, "in use")
    page.wait_for_function("!/p.fp8.(scale|format|margin)=/.test(location.hash)")


def test_what_failed_is_asked_again(shown: Shown) -> None:
    page = shown()
    page.clock.install()
    page.route("**/histogram?*", lambda route: route.abort())
    page.get_by_role("button", name="Next sampled step").click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/histogram?*")
    page.clock.fast_forward(5_000)
    expect(page.locator("[data-words=values]")).to_contain_text(f"at step {STEP + 2}")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_scale_that_is_none_is_passed_over(shown: Shown, casts: Path) -> None:
    page = shown(margin="1.5", format="e9m9", call="99")
    (row,) = recorded(casts / DELAYED, "metrics")
    for nonsense in ("0", "-1", "NaN", "Infinity", "1e300", "1e-300", "<b>", ""):
        kept = page.url.partition("&p.fp8.scale=")[0].partition("#")[2]
        page.evaluate("hash => location.hash = hash", f"{kept}&p.fp8.scale={nonsense}")
        assert metrics_shown(page, "tried")["underflow_pct"] == row["underflow_pct"], nonsense


def test_calls_with_scales_of_their_own_are_shown_together_or_one_by_one(shown: Shown, casts: Path) -> None:
    page = shown(run=CURRENT, step=2)
    rows, (row,) = recorded(casts / CURRENT, "histograms", step=2), recorded(casts / CURRENT, "metrics", step=2)
    assert len(rows) == 2 and rows[0]["scale"] != rows[1]["scale"]
    assert metrics_shown(page, "in use") == {name: pytest.approx(row[name], rel=1e-9) for name in SHOWN}
    for i, one in enumerate(rows):
        page.locator("[data-picker=call]").select_option(str(i))
        expected = by_numerics([one], [one["scale"]], FORMATS[one["format"]])
        expect(page.locator("[data-words=values]")).to_contain_text(f"{int(expected['n']):,} finite")
        assert metrics_shown(page, "in use") == {name: pytest.approx(expected[name], rel=1e-12) for name in SHOWN}


def test_what_was_rounded_is_said_to_be_approximate(shown: Shown) -> None:
    expect(shown(run=FLOAT32, step=2).locator("[data-words=rounded]")).to_contain_text("approximate")
    assert shown().locator("[data-words=rounded]").count() == 0


def test_the_good_run_is_shown_beside(shown: Shown, casts: Path) -> None:
    page = shown(baseline="quiet")
    expect(page.get_by_text(re.compile("the same tensor in quiet"))).to_be_visible()
    bars = bars_taken_away(page)
    assert sum(float(bar["share in quiet (%)"]) for bar in bars) == pytest.approx(100, abs=5)


def test_a_hostile_name_is_shown_as_text(shown: Shown) -> None:
    page = shown(layer=HOSTILE)
    expect(page.locator("[data-words=values]")).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0 and page.evaluate("window.hacked") is None


def test_it_begins_with_the_first_tensor_of_the_verdict_and_tells_what_has_no_histogram(
    casts_shown: Shown, casts: Path
) -> None:
    first = story(diagnose(casts / DELAYED))["headline"]["first"]
    title = f"{first['tensor']} of {first['layer']}"
    begun = casts_shown(view="distribution", run=DELAYED)
    expect(begun.get_by_text("No tensor is chosen, so this is")).to_contain_text(title)
    expect(begun.locator("[data-words=values]")).to_contain_text(title)
    missing: Any = casts_shown(view="distribution", run=DELAYED, layer="third", role="input")
    expect(missing.locator(".notice.problem")).to_contain_text("choose a tensor")

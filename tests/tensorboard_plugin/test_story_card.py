"""Timeline's band and markers, and a tensor's card, in a real Chromium: one page, held against compare and the routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import window
from playwright.sync_api import Browser, Page, expect
from shown import said
from tab import Tab
from verdict_records import CULPRIT, EVERY, ONSET

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.tensorboard_plugin.web import link

RUNS = {"run": "bad", "baseline": "baseline", "reference": "reference"}
TITLE = f"X of {CULPRIT}"


@pytest.fixture(scope="module")
def page(browser: Browser, board: str) -> Iterator[Page]:
    """In the order of the tests: on the culprit's timeline."""
    context = window(browser)
    page = context.new_page()
    state = {"view": "timeline", "layer": CULPRIT, "role": "input", "step": ONSET - EVERY}
    page.goto(link(board, **RUNS, **state).replace("/#fp8&", "/data/plugin_entry.html?name=fp8#"))
    page.locator("[data-drawn*=leaves]").wait_for()
    yield page
    context.close()


@pytest.fixture(scope="module")
def band(logdir: Path) -> Any:
    return Tab(logdir).json("band", run="bad", baseline="baseline", layer=CULPRIT, role="input")


def test_markers_lie_at_the_steps_that_compare_tells(page: Page, logdir: Path) -> None:
    found = compare(logdir / "bad", logdir / "baseline")
    onset = found.out_of_band.filter(layer=CULPRIT, role="input")["onset"][0]
    expected = f"diverges {found.divergence_step},leaves {onset},chosen {ONSET - EVERY}"
    expect(page.locator("[data-drawn]")).to_have_attribute("data-drawn", expected)
    rows = page.locator("[data-table=events]")
    expect(rows.locator("[data-event=diverges] button")).to_have_text([str(found.divergence_step)])
    left = found.out_of_band.filter(layer=CULPRIT, role="input")
    told = rows.locator("[data-event=leaves] button").all_inner_texts()
    assert sorted(map(int, told)) == sorted(left.unique("metric", keep="first", maintain_order=True)["onset"].to_list())


def test_the_table_tells_the_band_and_follows_the_step(page: Page, band: Any) -> None:
    cells = page.locator("[data-table=values] [data-metric=underflow_pct] td")
    metric = band["metrics"]["underflow_pct"]
    for step in (ONSET - EVERY, ONSET):
        expect(page.locator("[data-table=values] caption")).to_contain_text(f"step {step},")
        high = metric["high"][metric["step"].index(step)]
        expect(cells.last).to_have_text(f"up to {float(f'{high:.3g}'):g}%")
        page.get_by_role("button", name="Next sampled step").click()


def test_the_pointer_is_told_every_run_and_never_a_stale_value(page: Page) -> None:
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    chart = page.locator("figure canvas")
    width = (chart.bounding_box() or {})["width"]

    def point(share: float) -> None:
        chart.hover(position={"x": share * width, "y": 120})

    point(0.3)
    point(0.6)
    tip = page.locator(".tip")
    expect(tip).to_be_visible()
    assert tip.locator("tr").first.locator("th").all_inner_texts()[1:] == ["bad", "baseline", "reference", "band"]
    before = tip.locator("th").first.inner_text()
    page.evaluate(f"location.hash = location.hash.replace(/p.fp8.step=\\d+/, 'p.fp8.step={ONSET - EVERY}')")
    page.locator(f"[data-drawn$='chosen {ONSET - EVERY}']").wait_for()
    expect(tip.filter(visible=True)).to_have_count(0)
    point(0.3)
    expect(tip).to_be_visible()
    assert tip.locator("th").first.inner_text() != before


def test_the_card_says_since_when_and_with_which_values(page: Page, band: Any) -> None:
    card = page.locator(f"[data-card='{TITLE}']")
    since = card.locator("[data-words=band]")
    expect(since).to_contain_text(f"Out of the band of baseline since step {band['since']}")
    card.locator("summary").first.click()
    for run in RUNS.values():
        expect(card.locator("[data-words=values]")).to_contain_text(run)
    expect(card.locator("[data-words=why]")).not_to_be_empty()
    expect(card.get_by_role("link")).to_have_text(["Distribution", "What if"])


def test_axes_are_chosen_and_said(page: Page) -> None:
    page.locator("[data-picker=axes]").select_option("robust")
    expect(page.get_by_text("1st to 99th percentile")).to_be_visible()
    assert "p.fp8.axes=robust" in page.url or page.wait_for_function("location.hash.includes('axes=robust')")
    page.locator("[data-picker=axes]").select_option("")


def test_a_name_opens_its_card_for_pointer_and_keyboard(page: Page) -> None:
    page.get_by_role("tab", name="Map").click()
    names = page.locator("main .named > a")
    names.first.wait_for()
    page.mouse.move(1, 1)
    card = page.locator(".over .card")
    names.first.focus()
    expect(card).to_be_visible()
    assert names.first.get_attribute("aria-describedby") == card.get_attribute("id")
    expect(card.locator("svg [data-marker=diverges]")).to_have_count(1)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.over') !== null")
    expect(card).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
    assert page.evaluate("document.activeElement.matches('.named > a')")
    names.nth(1).hover()
    expect(card).to_be_visible()
    expect(card.locator("h3")).to_have_text(names.nth(1).inner_text())
    card.get_by_role("link", name="Timeline").click()
    expect(page.get_by_role("tab", name="Timeline")).to_have_attribute("aria-selected", "true")


def test_the_card_says_what_the_story_says(page: Page, logdir: Path) -> None:
    arguments = "diagnose", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "reference"
    first = said(*arguments)["story"]["tensors"][0]
    changes = {f"p.fp8.{name}": first[name] for name in ("layer", "role")}
    page.evaluate(
        """changes => {
          const at = new URLSearchParams(location.hash.slice(1));
          for (const [name, value] of Object.entries(changes)) at.set(name, value);
          location.hash = at.toString();
        }""",
        changes,
    )
    card = page.locator("main .card.in-line")
    ranking = card.locator("[data-words=ranking]")
    expect(ranking).to_contain_text(f"Rank {first['harm_rank']} by harm, {first['error_rank']} by error")
    assert ("Blamed" in ranking.inner_text()) == first["blamed"]
    card.locator("summary").first.click()
    expect(card.locator("[data-words=why]")).to_have_text(first["why"])
    expect(card.locator("[data-words=values]")).to_contain_text("medians over the later half")


def test_the_timeline_begins_with_the_first_tensor_of_the_verdict_and_gives_way_to_a_choice(page: Page) -> None:
    page.evaluate("location.hash = location.hash.replace(/&p.fp8.(layer|role|view)=[^&]*/g, '') + '&p.fp8.view=timeline'")
    told = page.get_by_text("No tensor is chosen, so this is")
    expect(told).to_contain_text(TITLE)
    expect(page.locator("main > div > [data-card]")).to_have_attribute("data-card", TITLE)
    expect(page.locator("[data-table=values] [data-metric=underflow_pct]")).to_be_visible()
    assert "p.fp8.layer" not in page.url
    page.evaluate("location.hash = location.hash.replace('view=timeline', 'view=distribution')")
    expect(page.locator("#view[data-view=Distribution] [data-words=values]")).to_contain_text(TITLE)
    expect(told).to_contain_text(TITLE)
    page.evaluate("location.hash = location.hash.replace('view=distribution', 'view=timeline')")
    expect(page.locator("main > div > [data-card]")).to_have_attribute("data-card", TITLE)
    page.locator("[data-picker=tensor]").fill("W of up")
    page.locator("[data-picker=tensor]").dispatch_event("change")
    expect(page.locator("main > div > [data-card]")).to_have_attribute("data-card", "W of up")
    expect(told).to_have_count(0)
    page.wait_for_url("**p.fp8.layer=up*")

"""The headline above every view and the strip of events, in a real Chromium, against the story of the same records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browser import serving, window
from playwright.sync_api import Browser, Page, expect
from shown import cells, table
from verdict_records import CULPRIT, ONSET, TwoFaults, record

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story

Open = Callable[..., Page]
THREE = {"run": "bad", "baseline": "baseline", "reference": "reference"}


def opened(frame: Open, **state: object) -> Page:
    page = frame(**state)
    page.locator(".headline[data-stage=all]").wait_for()
    return page


@pytest.fixture(scope="module")
def told(logdir: Path) -> dict[str, Any]:
    return story(diagnose(logdir / "bad", logdir / "baseline", logdir / "reference"))


def test_the_headline_names_cause_step_and_tensor_on_every_view_and_is_asked_for_once(
    frame: Open, told: dict[str, Any]
) -> None:
    page = opened(frame, **THREE)
    expect(page.locator("#tab-verdict")).to_have_attribute("aria-selected", "true")  # the tab opens on it
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/verdict?" in request.url else None)
    headline = page.locator(".headline")
    for view in ("Map", "Timeline", "Distribution", "What if", "Fingerprints", "Verdict"):
        page.get_by_role("tab", name=view, exact=True).click()
        expect(page.locator("#view")).to_have_attribute("data-view", view)
        expect(headline.locator("h1")).to_have_text(f"✖ harmedbad (run): {told['headline']['title']}")
        shown = " ".join(headline.inner_text().split())
        assert told["headline"]["cause_told"] in shown and f"X of {CULPRIT} since step {ONSET}" in shown
        assert "FP8" in shown and f"{told['headline']['confidence']} confidence" in shown and "95% interval" in shown
    assert asked == []

    page.get_by_role("tab", name="Map", exact=True).click()
    headline.get_by_role("link", name=f"X of {CULPRIT}").click()
    expect(page.locator("#tab-timeline")).to_have_attribute("aria-selected", "true")
    state = unquote(page.url)
    assert f"p.fp8.layer={CULPRIT}" in state and f"p.fp8.step={ONSET}" in state
    headline.get_by_role("link", name="All the evidence").click()
    expect(page.locator("#tab-verdict")).to_have_attribute("aria-selected", "true")


def test_two_culprits_are_told_as_two(browser: Browser, tmp_path: Path) -> None:
    record(tmp_path / "baseline", fault=False, fp8=True, model=TwoFaults)
    record(tmp_path / "bad", fault=True, fp8=True, model=TwoFaults)
    with serving(tmp_path) as address:
        page = window(browser).new_page()
        page.goto(f"{address}#p.fp8.run=bad&p.fp8.baseline=baseline")
        page.locator(".headline[data-stage=all]").wait_for()
        shown = " ".join(page.locator(".headline").inner_text().split())
    both = f"X of {CULPRIT} went wrong at or before step {ONSET}", "Also wrong by then: X of up."
    assert all(told in shown for told in both) and "FP8" in shown


def test_the_strip_and_its_table_show_every_event_in_order_and_lead_to_its_step(frame: Open, told: dict[str, Any]) -> None:
    page = opened(frame, view="verdict", **THREE)
    strip = page.locator(".strip")
    strip.locator("svg [data-step]").first.wait_for()
    marks = strip.locator("svg [data-step]").all()
    assert sum(len((mark.get_attribute("data-kinds") or "").split()) for mark in marks) == len(told["events"])
    assert strip.locator("svg .row-name").all_text_contents()[:-1] == told["rows"]
    at = {
        kind: (mark.bounding_box() or {})["x"]
        for mark in reversed(marks)  # the first of each kind
        for kind in (mark.get_attribute("data-kinds") or "").split()
    }
    assert at["scale"] == at["warning"] < at["loss"]
    boxes = [label.bounding_box() or {} for label in strip.locator("svg .label").all()]
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or abs(one["y"] - other["y"]) >= 20

    strip.locator("summary").click()
    rows = cells(table(page, "Events in order"))
    assert [(row[0], row[1], row[3]) for row in rows] == [(str(e["step"]), e["row"], e["what"]) for e in told["events"]]

    strip.locator("svg a").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#tab-timeline")).to_have_attribute("aria-selected", "true")
    assert "p.fp8.step=49" in unquote(page.url)


def test_tensors_are_listed_by_harm_with_a_reason_each(frame: Open, told: dict[str, Any]) -> None:
    page = opened(frame, view="verdict", **THREE)
    rows = cells(table(page, "Blamed first"))
    assert [(row[0], row[3], row[6]) for row in rows] == [
        (str(t["harm_rank"]), t["why"], str(t["error_rank"])) for t in told["tensors"][:8]
    ]
    assert rows[0][3].startswith("Blamed: ")


def test_a_pair_with_the_same_fault_is_not_cleared_and_a_run_alone_cannot_tell(frame: Open) -> None:
    page = opened(frame, view="verdict", run="again", baseline="bad", reference="")
    headline = page.locator(".headline")
    expect(headline.locator("h1")).to_contain_text(
        "✔ no harmagain (run): We cannot tell whether anything is wrong. The loss follows the baseline's."
    )
    expect(headline).to_contain_text("; gaps from")
    assert "First tensor" not in headline.inner_text()
    page.locator("[data-part=run]").select_option("baseline")
    page.locator("[data-part=baseline]").select_option("")
    expect(headline.locator("h1")).to_have_text(
        "? cannot tellbaseline (run): We found nothing wrong. The loss does not rise."
    )
    expect(headline).to_contain_text("Give a baseline")


def test_nothing_changes_under_the_readers_eyes_when_records_grow(frame: Open) -> None:
    grows = """
      const fetched = window.fetch;
      window.newer = false;
      window.fetch = async (...asked) => {
        const answer = await fetched(...asked);
        if (!window.newer || !String(asked[0]).endsWith('/runs')) return answer;
        const told = await answer.json();
        for (const run of told.runs) run.version = `${run.version}-newer`;
        return new Response(JSON.stringify(told), {headers: {'Content-Type': 'application/json'}});
      };
    """
    page = frame(grows, view="fingerprints", **THREE)
    page.locator(".headline[data-stage=all]").wait_for()
    before = page.locator(".headline h1").inner_text()
    page.evaluate("window.newer = true")
    again = page.get_by_role("button", name="Judge them anew")
    again.wait_for()
    assert page.locator(".headline h1").inner_text() == before
    again.click()
    again.wait_for(state="detached")
    page.locator(".headline[data-stage=all]").wait_for()

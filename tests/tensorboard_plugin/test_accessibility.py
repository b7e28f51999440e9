"""What axe-core finds in each view, light and dark; the glossary; and the verdict as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import markdown
import pytest
from playwright.sync_api import Page, expect

import nemo_fp8_debug
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import write_markdown
from nemo_fp8_debug.numerics.metric_names import LABELS
from nemo_fp8_debug.tensorboard_plugin.records.metadata import describe_metrics

Open = Callable[..., Page]
THREE = {"run": "bad", "baseline": "baseline", "reference": "reference"}
FRONTEND = Path(nemo_fp8_debug.__file__).parent / "tensorboard_plugin" / "frontend"
AXE = (FRONTEND / "node_modules" / "axe-core" / "axe.min.js").read_text()
#: WCAG 2.2 AA, and what axe calls best practice
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: of each view, what is there once it is drawn
DRAWN = {
    "Verdict": ".strip svg a",
    "Course": "[data-drawn]:not([data-drawn=''])",
    "Map": "[data-panel=run] [data-drawn]",
    "Timeline": "[data-drawn]",
    "Distribution": "[data-drawn]",
    "What if": "table",
    "Runs": "table",
    "Fingerprints": "table",
}


def violations(page: Page) -> list[Any]:
    found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)["violations"]
    return [(one["impact"], one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]


def test_no_view_has_anything_that_axe_objects_to_in_light_and_dark(frame: Open) -> None:
    page = frame(layer="down", role="input", pinned="again", **THREE)
    page.locator(".headline[data-stage=all]").wait_for()
    page.evaluate(AXE)
    for view, drawn in DRAWN.items():
        page.get_by_role("tab", name=view, exact=True).click()
        page.locator(f"#view[data-view='{view}'] {drawn}").first.wait_for()
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            assert (view, theme, violations(page)) == (view, theme, [])
    page.get_by_role("button", name="What the words mean").click()
    page.get_by_role("dialog", name="Glossary").wait_for()
    assert violations(page) == []


def test_a_question_mark_opens_the_glossary_at_its_word(frame: Open) -> None:
    page = frame(view="map", metric="underflow_pct", **THREE)
    help_ = page.get_by_role("button", name='What "underflow" means')
    help_.click()
    glossary = page.get_by_role("dialog", name="Glossary")
    expect(glossary).to_contain_text("share of the values that are not zero and become zero in the cast, in percent")
    assert "p.fp8.word=underflow" in page.url
    glossary.get_by_label("Search").fill("wgrad")
    expect(glossary.locator("dt", has_text="wgrad")).to_have_count(1)
    expect(glossary).to_contain_text("dW = dY^T X")
    page.keyboard.press("Escape")
    expect(glossary).to_have_count(0)
    page.wait_for_url(lambda address: "p.fp8.word" not in address)
    expect(help_).to_be_focused()


def test_every_metric_has_an_entry_in_the_glossary() -> None:
    page = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    labels = {about["label"].removesuffix(", in the units of the loss") for about in describe_metrics()}
    assert labels >= {label for name, (label, _) in LABELS.items() if not name.startswith("error_of")} - {"update"}
    assert {label for label in labels if f"\n| {label} |" not in page} == set()


def test_the_verdict_is_copied_as_markdown(frame: Open, logdir: Path) -> None:
    page = frame(view="map", **THREE)
    page.get_by_role("button", name="Copy as Markdown").click()
    page.get_by_text("Copied.").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    told = story(diagnose(logdir / "bad", logdir / "baseline", logdir / "reference"))
    heading, facts = copied.split("\n\n", 1)
    assert heading == f"### bad against baseline: {told['headline']['title']}"
    assert told["headline"]["cause_told"] in facts
    assert facts.split("\n\n", 1)[1].strip() == write_markdown(told).split("\n\n", 1)[1]


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=hack()>", "a|b", "a`b`", "[x](javascript:y)", "two\nlines", "__init__"]
)
def test_names_of_a_record_are_no_markup_in_it(name: str) -> None:
    told = {
        "headline": {
            "confidence": "high", "unit": "step", "cause_told": f"X of {name} is clipped.", "gap_told": None, "change": None,
            "first": {"layer": name, "role": "input", "tensor": "X", "since": 3, "is_consequence": False, "with": 0},
            "warning": f"X of {name} at step 2.",
        },
        "events": [{"step": 3, "what": f"X of {name}: underflow 1% -> 2%"}],
        "tensors": [
            {"harm_rank": 1, "layer": name, "tensor": "X", "why": name, "metric": "mse", "expected": 1.0, "found": 2.0,
             "zero_since": None}
        ],
    }  # fmt: skip
    html = markdown.markdown(write_markdown(told), extensions=["tables"])
    assert "<img" not in html and "<a " not in html and "<em>" not in html and "<strong>in" not in html
    assert html.count("<tr>") == 4 and html.count("<td>") == 2 + 4

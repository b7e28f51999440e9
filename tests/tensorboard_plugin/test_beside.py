"""More runs than three in Timeline and Course: one page in a real Chromium, served by itself, held against the records."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import serving, window
from playwright.sync_api import Browser, Page, expect
from samples import sample
from tab import FC1, start

from nemo_fp8_debug.record.reader import read_table

OTHERS = [f"other-{i}" for i in range(7)]
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine runs, each with losses and one metric of its own."""
    folder = tmp_path_factory.mktemp("many")
    for i, name in enumerate(["run", "baseline", *OTHERS]):
        record = start(folder / name)
        for step in range(STEPS):
            record.record(sample(step, [{"layer": FC1, "scale_source": "engine", "amax": 1.0 + i + step}]))
            record.record_steps({step: {"loss": 2.0 + i - 0.01 * step}})
        record.close()
    return folder


@pytest.fixture(scope="module")
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    """On the timeline of a tensor, in the order of the tests."""
    context = window(browser)
    page = context.new_page()
    state = {"view": "timeline", "run": "run", "baseline": "baseline", "reference": "", "layer": FC1, "role": "input"}
    state_in_address = "&".join(f"p.fp8.{name}={value}" for name, value in (state | {"metrics": "amax"}).items())
    with serving(folder) as address:
        page.goto(f"{address}#{state_in_address}")
        page.locator("figure [data-drawn]").wait_for()
        yield page
        context.close()


def taken_away(page: Page) -> dict[str, list[tuple[float, float]]]:
    """By run, what the charts show of loss and metric."""
    with page.expect_download() as download:
        page.locator("figure button", has_text="CSV").click()
    found: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(io.StringIO(Path(download.value.path()).read_text(), newline="")):
        found.setdefault(row["run"], []).append((float(row["loss"]), float(row["amax"])))
    return found


def recorded(run: Path) -> list[tuple[float, float]]:
    losses, metrics = read_table(run, "steps", ["step", "loss"]), read_table(run, "metrics", ["step", "amax"])
    return losses.join(metrics, on="step").sort("step").select("loss", "amax").rows()


def test_a_run_is_added_with_the_keyboard_and_is_drawn_named_and_listed(page: Page, folder: Path) -> None:
    page.get_by_text("Also show:").focus()
    page.keyboard.press("Enter")
    for _ in range(2):
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
    chosen = OTHERS[:2]
    assert page.locator("[data-beside]").evaluate_all("all => all.map((one) => one.dataset.beside)") == chosen
    page.wait_for_url(lambda address: f"p.fp8.pinned={','.join(chosen)}" in unquote(address))
    page.get_by_text("Reading the record").wait_for(state="detached")
    assert taken_away(page) == {name: recorded(folder / name) for name in ("run", "baseline", *chosen)}
    strokes = page.locator("[data-beside] line").evaluate_all("all => all.map((one) => one.getAttribute('style'))")
    assert len(set(strokes)) == len(chosen)
    chart = page.locator("figure canvas").bounding_box()
    assert chart
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 120)
    assert page.locator(".tip tr").first.locator("th").all_inner_texts()[1:3] == ["run", "baseline"]
    assert page.locator(".tip tr").first.locator("th").all_inner_texts()[3:5] == chosen


def test_at_most_eight_are_shown_and_the_page_says_so(page: Page) -> None:
    for name in OTHERS[2:6]:
        page.locator(f"[data-also={name}]").check()
    expect(page.locator(f"[data-also={OTHERS[6]}]")).to_be_disabled()
    expect(page.locator(".beside legend")).to_contain_text("at most 8 runs in all")
    page.wait_for_url(f"**{OTHERS[5]}")
    page.evaluate(f"location.hash = location.hash.replace('{OTHERS[5]}', '{OTHERS[5]},{OTHERS[6]}')")
    expect(page.locator(".beside [role=status]")).to_contain_text("1 more is pinned and not shown: 8 runs at most")
    page.get_by_text("Reading the record").wait_for(state="detached")
    assert list(taken_away(page)) == ["run", "baseline", *OTHERS[:6]]
    page.get_by_label(f"Do not show {OTHERS[0]}").click()
    expect(page.locator(".beside [role=status]")).to_have_count(0)
    assert page.locator("[data-beside]").evaluate_all("all => all.map((one) => one.dataset.beside)") == OTHERS[1:]


def test_course_has_their_losses_and_colors_any_of_them(page: Page, folder: Path) -> None:
    page.get_by_role("tab", name="Course").click()
    show = page.locator("[data-picker=show]")
    assert {"run against baseline", *(f"{name} against baseline" for name in OTHERS[1:]), *OTHERS[1:]} <= set(
        show.locator("option").all_inner_texts()
    )
    page.locator("[data-picker=metric]").select_option("amax")
    show.select_option(label=OTHERS[3])
    page.locator(f"[data-drawn='amax also {OTHERS[3]} 0 {STEPS - 1}']").wait_for()
    with page.expect_download() as download:
        page.locator("figure button", has_text="CSV").click()
    (row,) = list(csv.reader(io.StringIO(Path(download.value.path()).read_text(), newline="")))[1:]
    assert [float(value) for value in row[2:]] == [amax for _, amax in recorded(folder / OTHERS[3])]
    chart = page.locator("figure canvas").first.bounding_box()
    assert chart
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 60)
    for name in OTHERS[1:]:
        expect(page.get_by_text(f"loss, {name}: ")).to_be_visible()

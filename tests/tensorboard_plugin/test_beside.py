"""More runs than three in Timeline and Course: one page in a real Chromium, served by itself, held against the records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import pytest
from browser import serving, window
from playwright.sync_api import Browser, Page, expect
from samples import sample
from tab import FC1, start

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.record.reader import read_table_rows

OTHERS = [f"other-{i}" for i in range(7)]
STEPS = 20
#: the run's learning rate departs from the others', and then its loss does
DEPARTS, JUMPS = 12, 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine runs, each with losses and one metric of its own."""
    folder = tmp_path_factory.mktemp("many")
    for i, name in enumerate(["run", "baseline", *OTHERS]):
        record = start(folder / name)
        for step in range(STEPS):
            record.record(sample(step, [{"layer": FC1, "scale_source": "engine", "amax": 1.0 + i + step}]))
            is_off = [name == "run" and step >= since for since in (DEPARTS, JUMPS)]
            record.record_steps({step: {"loss": 2.0 + i - 0.01 * step + 20 * is_off[1], "lr": 4e-3 if is_off[0] else 1e-3}})
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
    losses, metrics = read_table_rows(run, "steps", ["step", "loss"]), read_table_rows(run, "metrics", ["step", "amax"])
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
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
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
    expect(page.locator(".beside [role=status]")).to_contain_text("1 more is pinned but not shown: at most 8 runs")
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
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    chart = page.locator("figure canvas").first.bounding_box()
    assert chart
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 60)
    for name in OTHERS[1:]:
        expect(page.get_by_text(f"loss, {name}: ")).to_be_visible()


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """As WCAG 2.2 defines it."""

    def luminance(rgb: tuple[int, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def rgb(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in re.findall(r"\d+", text)[:3])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_of_pinned_runs_stand_out_from_the_ground(page: Page, theme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=theme)
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    colors = page.locator("[data-beside] line").evaluate_all("all => all.map((one) => getComputedStyle(one).stroke)")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert len(set(colors)) == 6 and {color: contrast(rgb(color), rgb(ground)) >= 3 for color in colors} == dict.fromkeys(
        colors, True
    )


def test_learning_rates_that_differ_are_told_beside_settings_that_do_not(page: Page) -> None:
    page.get_by_role("tab", name="Fingerprints").click()
    rates = page.locator("[data-words=rates]")
    expect(rates).to_contain_text(f"first at step {DEPARTS} (still the same at step {DEPARTS - 1})")
    expect(rates).to_contain_text("where run has 0.004 and baseline 0.001")


def test_what_if_says_that_fp8_is_not_to_blame(page: Page, folder: Path) -> None:
    assert not story(diagnose(folder / "run", folder / "baseline"))["headline"]["about_fp8"]
    page.get_by_role("tab", name="What if").click()
    expect(page.locator("[data-words='not by FP8']")).to_contain_text("FP8 is not to blame (high confidence)")

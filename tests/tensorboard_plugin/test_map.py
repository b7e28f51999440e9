"""The page in TensorBoard, in a real browser: the map, runs that grow, odd names, and where TensorBoard is put."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from browser import tensorboard, window
from playwright.sync_api import Browser, FrameLocator, Page, expect
from samples import FINGERPRINT, sample

from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.writer import RunRecordWriter
from nemo_fp8_debug.tensorboard_plugin.web import link

HOSTILE = "decoder.layers.0.<img src=x onerror='top.hacked=1'>"
LAYERS = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in range(3) for j in (1, 2)]
CULPRIT = LAYERS[3]
STEPS = range(0, 800, 10)


def write(folder: Path, steps: range = STEPS, harmed: bool = False, more: tuple[str, ...] = ()) -> RunRecordWriter:
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    for step in steps:
        rows = [
            {"layer": layer, "role": role, "underflow_pct": 0.1 + 0.01 * i + 0.0001 * step}
            for i, layer in enumerate((*LAYERS, *more))
            for role in ("input", "weight", "grad_output")
        ]
        rows[9]["underflow_pct"] = 40.0 if harmed and step >= 400 else 0.05
        record.record(sample(step, rows))
        record.record_steps({step: {"loss": 2.0}})
    return record


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "baseline" / "fp8_debug").close()
    write(folder / "bad" / "fp8_debug", harmed=True).close()
    write(folder / "growing", range(0, 30, 10)).close()
    write(folder / "<b onclick=top.hacked=1>odd", range(0, 30, 10), more=(HOSTILE,)).close()
    return folder


@pytest.fixture(scope="module")
def board(logdir: Path) -> Iterator[str]:
    with tensorboard("--logdir", logdir) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = window(browser).new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    assert page.evaluate("window.hacked") is None
    assert not faults
    page.close()


def opened(page: Page, address: str, **state: object) -> FrameLocator:
    page.goto(link(address, **state))
    return page.frame_locator("iframe")


def values_of(tab: FrameLocator, panel: str) -> tuple[str, str, float]:
    shown = tab.locator(f"[data-panel={panel}]")
    layer, role, value = (shown.get_attribute(f"data-{name}") for name in ("layer", "role", "value"))
    assert layer and role and value
    return layer, role, float(value)


def at_step(tab: FrameLocator, step: int, panel: str = "run") -> None:
    expect(tab.locator(f"[data-panel={panel}] [data-drawn='{step}']")).to_be_visible()


def in_address(page: Page, state: str) -> None:
    """The address is written ten times a second at most."""
    expect(page).to_have_url(re.compile(re.escape(state)))


def test_the_worst_cell_is_the_worst_of_the_record(page: Page, board: str, logdir: Path) -> None:
    tab = opened(page, board, run="bad", baseline="baseline", step=555, view="map", color="all")
    at_step(tab, 550)
    rows = read_table_rows(logdir / "bad" / "fp8_debug", "metrics", where={"step": 550})
    worst = rows.sort("underflow_pct").tail(1)
    assert values_of(tab, "run") == (*worst.select("layer", "role").row(0), pytest.approx(40.0))
    assert values_of(tab, "difference") == (CULPRIT, "input", pytest.approx(39.95))
    assert values_of(tab, "baseline")[0] != CULPRIT


def test_colors_stand_for_the_changes_that_count(page: Page, board: str, logdir: Path) -> None:
    """One percentage point counts of a baseline that moves by less."""
    tab = opened(page, board, run="bad", baseline="baseline", step=550, view="map", metric="underflow_pct")
    expect(tab.locator("[data-panel=run] p")).to_have_text(f"Farthest: X of {CULPRIT}, 40%, 40x threshold")
    expect(tab.locator(".legend")).to_contain_text("40x threshold")
    upper = tab.get_by_label("Upper limit of the colors")
    upper.focus()
    page.keyboard.press("ArrowLeft")
    expect(tab.get_by_role("button", name="Automatic limits")).to_be_visible()
    in_address(page, "p.fp8.limits=underflow_pct%20spread%20-39.95%20")
    assert "40x" not in (upper.get_attribute("aria-valuetext") or "")
    tab.locator("[data-picker=color]").select_option("all")
    expect(tab.locator(".legend").first).to_contain_text("The warm-up, the first tenth of the samples, is left out")
    expect(tab.get_by_role("button", name="Automatic limits")).to_have_count(0)
    found = tab.get_by_label("Upper limit of the colors").get_attribute("aria-valuetext")
    later = [
        read_table_rows(logdir / name / "fp8_debug", "metrics").filter(pl.col("step") >= 80) for name in ("bad", "baseline")
    ]
    highest = max(rows["underflow_pct"].quantile(0.99, "lower") for rows in later)
    assert found and float(found) == pytest.approx(highest, rel=0.02)


def test_what_is_told_of_a_place_follows_the_step_and_the_metric(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", baseline="baseline", step=390, view="map", metric="underflow_pct")
    at_step(tab, 390)
    expect(tab.locator(".legend")).to_have_count(1)  # until it is known what counts, maps have a scale each
    expect(tab.locator(".legend")).to_contain_text("x threshold")
    tab.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    x, y = place_of(tab, column=5.9, row=2.9)
    page.mouse.move(x, y)
    told = tab.locator(".under")
    expect(told).to_contain_text(f"dY of {LAYERS[5]}")
    assert (box := told.bounding_box()) and box["width"] > 150  # at the right edge
    page.mouse.move(*place_of(tab, column=3.5, row=1.5))
    expect(told).to_contain_text("0.05%")
    tab.get_by_role("button", name="Next sampled step").evaluate("button => button.click()")
    at_step(tab, 400)
    expect(told).to_contain_text("40%, 40x threshold")
    tab.locator("[data-picker=metric]").select_option("mse")
    expect(tab.locator(".legend").first).to_contain_text("mean squared error")
    at_step(tab, 400)
    tab.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    page.mouse.move(*place_of(tab, column=3.5, row=1.5))
    page.mouse.move(*place_of(tab, column=3.6, row=1.6))
    expect(told).to_contain_text(f"X of {CULPRIT}")
    expect(told).not_to_contain_text("%")


def place_of(tab: FrameLocator, column: float, row: float) -> tuple[float, float]:
    """Of a map of 6 columns and 3 rows, in pixels of the page."""
    box = tab.locator("[data-panel=run] .chart-box").bounding_box()
    assert box
    left, right, top, bottom = 64, 12, 26, 96
    x = box["x"] + left + (box["width"] - left - right) * column / 6
    return x, box["y"] + top + (box["height"] - top - bottom) * row / 3


def test_course_says_since_when(page: Page, board: str, logdir: Path, tmp_path: Path) -> None:
    """The table, the keyboard, a click and a drag; against the record."""
    tab = opened(page, board, run="bad", baseline="baseline", view="course", metric="underflow_pct", step=0)
    chart = tab.locator("[data-drawn='underflow_pct against 0 790']")
    expect(chart).to_be_visible()
    expect(tab.locator("div.table tbody tr").first.locator("td")).to_have_text([f"X of {CULPRIT}", "40", "40", "400", "400"])
    expect(tab.locator("div.table tbody tr").nth(1).locator("td").last).to_have_text("-")
    tab.locator(".keyed").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    in_address(page, f"p.fp8.layer={LAYERS[1]}")
    in_address(page, "p.fp8.step=10")
    box = chart.bounding_box()
    assert box
    across = lambda share: box["x"] + 150 + (box["width"] - 170) * share  # noqa: E731
    line = box["y"] + 50
    page.mouse.move(across(0.25), line)
    page.mouse.down()
    page.mouse.move(across(0.75), line, steps=3)
    page.mouse.up()
    expect(tab.locator("[data-zoom=from]")).to_have_value(re.compile("19[678]"))
    begin, end = (tab.locator(f"[data-zoom={name}]").input_value() for name in ("from", "to"))
    expect(tab.locator(f"[data-drawn='underflow_pct against {begin} {end}']")).to_be_visible()
    in_address(page, f"p.fp8.from={begin}")
    assert int(end) == pytest.approx(592, abs=2)
    # What is being typed stays, though the page is drawn anew meanwhile.
    tab.locator("[data-zoom=from]").fill("400")
    for shown in ("run", "against"):
        page.evaluate(
            "shown => { location.hash = location.hash.replace(/&p.fp8.show=[a-z]+|$/, `&p.fp8.show=${shown}`); }", shown
        )
        expect(tab.locator(f"[data-drawn='underflow_pct {shown} {begin} {end}']")).to_be_visible()
    expect(tab.locator("[data-zoom=from]")).to_have_value("400")
    tab.locator("[data-zoom=from]").press("Enter")
    expect(tab.locator(f"[data-drawn='underflow_pct against 400 {end}']")).to_be_visible()
    # The warm-up is the run's: the first steps in sight are not left out.
    expect(tab.locator("div.table tbody tr").first.locator("td")).to_have_text([f"X of {CULPRIT}", "40", "40", "400", "400"])
    tab.get_by_role("button", name="All steps").click()
    tab.locator("[data-picker=show]").select_option("run")
    expect(tab.locator("[data-drawn='underflow_pct run 0 790']")).to_be_visible()
    with page.expect_download() as download:
        tab.locator("figure").get_by_role("button", name="CSV").click()
    download.value.save_as(tmp_path / "course.csv")
    with (tmp_path / "course.csv").open() as file:
        head, *rows = csv.reader(file)
    recorded = read_table_rows(logdir / "bad" / "fp8_debug", "metrics", ["step", "layer", "role", "underflow_pct"])
    found = {
        (layer, role, int(step[5:])): float(v)
        for layer, role, *values in rows
        for step, v in zip(head[2:], values, strict=True)
    }
    assert found == {(layer, role, step): pytest.approx(v, rel=1e-6) for step, layer, role, v in recorded.iter_rows()}


def test_steps_and_metrics_move_the_map_and_the_address(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", baseline="baseline", step=390, view="map", color="all")
    at_step(tab, 390)
    assert values_of(tab, "run")[0] != CULPRIT
    tab.get_by_role("button", name="Next sampled step").click()
    at_step(tab, 400)
    assert values_of(tab, "run")[0] == CULPRIT
    in_address(page, "p.fp8.step=400")
    tab.get_by_label("Metric").select_option("mse")
    expect(tab.locator(".legend").first).to_contain_text("mean squared error")
    in_address(page, "p.fp8.metric=mse")


def test_playing_goes_to_the_end_by_itself(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", step=770, view="map")
    at_step(tab, 770)
    tab.get_by_role("button", name="Play through the steps").click()
    at_step(tab, 790)
    expect(tab.get_by_role("button", name="Play through the steps")).to_be_visible()


def test_the_keyboard_reaches_a_tensor_and_its_timeline_and_back(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", view="map")
    at_step(tab, 790)
    tab.locator("[data-panel=run] .keyed").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    in_address(page, "p.fp8.layer=decoder.layers.1.mlp.linear_fc1")
    page.keyboard.press("Enter")
    expect(tab.get_by_role("tab", name="Timeline")).to_have_attribute("aria-selected", "true")
    expect(tab.get_by_role("tab", name="Timeline")).to_be_focused()
    page.go_back()
    expect(tab.get_by_role("tab", name="Map")).to_have_attribute("aria-selected", "true")


def test_a_click_chooses_the_tensor_under_it(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", view="map", step=500)
    at_step(tab, 500)
    tab.locator(".headline[data-stage=all]").wait_for()  # it moves the map as it is filled in
    page.mouse.click(*place_of(tab, column=3.5, row=1.5))  # fc1 X, W, dY, fc2 X, ...: the culprit
    in_address(page, f"p.fp8.layer={CULPRIT}")
    in_address(page, "p.fp8.role=input")
    expect(tab.locator(".under")).to_contain_text(f"X of {CULPRIT}")


def test_the_csv_of_a_map_is_the_record(page: Page, board: str, logdir: Path, tmp_path: Path) -> None:
    tab = opened(page, board, run="bad", baseline="", step=500, view="map")
    at_step(tab, 500)
    with page.expect_download() as download:
        tab.locator("[data-panel=run]").get_by_role("button", name="CSV").click()
    download.value.save_as(tmp_path / "map.csv")
    with (tmp_path / "map.csv").open() as file:
        head, *rows = csv.reader(file)
    recorded = read_table_rows(logdir / "bad" / "fp8_debug", "metrics", ["layer", "role", "underflow_pct"], {"step": 500})
    assert head[:2] == ["layer", "role"]
    assert {(layer, role): float(value) for layer, role, value in rows} == {
        (layer, role): pytest.approx(value, rel=1e-6) for layer, role, value in recorded.iter_rows()
    }


def test_names_that_are_html_are_text(page: Page, board: str) -> None:
    tab = opened(page, board, run="<b onclick=top.hacked=1>odd", layer=HOSTILE, role="grad_output", view="map", baseline="")
    at_step(tab, 20)
    expect(tab.locator("[data-panel=run] h3")).to_contain_text("<b onclick=top.hacked=1>odd")
    expect(tab.locator("[data-panel=run] b").first).to_have_text(f"X of {HOSTILE}")
    for view in ("Timeline", "Distribution", "What if", "Verdict", "Fingerprints"):
        tab.get_by_role("tab", name=view).click()
        tab.locator(f"#view[data-view='{view}'] > :not(h2)").first.wait_for()
    assert tab.locator("img").count() == 0


def test_a_run_that_grows_is_followed(page: Page, board: str, logdir: Path) -> None:
    tab = opened(page, board, run="growing", view="map")
    at_step(tab, 20)
    write(logdir / "growing", range(30, 40, 10)).close()  # as a run that goes on from a checkpoint
    at_step(tab, 30)
    expect(tab.locator("header")).to_contain_text("growing, at step 30")


def test_without_a_record_it_says_how_to_get_one(page: Page, tmp_path: Path) -> None:
    with tensorboard("--logdir", tmp_path) as address:
        page.goto(f"{address}/data/plugin_entry.html?name=fp8")
        expect(page.locator(".notice")).to_contain_text("No record of FP8 here")
        expect(page.locator(".notice")).to_contain_text(str(tmp_path))
        expect(page.locator("pre")).to_contain_text("FP8DebugCallback")


def test_a_run_without_a_sample_says_what_is_awaited(page: Page, tmp_path: Path) -> None:
    record = RunRecordWriter(tmp_path / "begun")
    record.open(FINGERPRINT)
    with tensorboard("--logdir", tmp_path) as address:
        tab = opened(page, address)
        expect(tab.locator(".notice")).to_contain_text("begun has no samples yet")


def test_under_a_path_prefix_and_with_several_logdirs(page: Page, logdir: Path) -> None:
    spec = f"here:{logdir / 'baseline'},there:{logdir / 'bad'}"
    with tensorboard("--logdir_spec", spec, "--path_prefix", "/a/b") as address:
        tab = opened(page, address, run="there", baseline="here", step=600, view="map", color="all")
        at_step(tab, 600)
        assert values_of(tab, "difference")[:2] == (CULPRIT, "input")


def test_an_unknown_run_in_the_address_is_said(page: Page, board: str) -> None:
    tab = opened(page, board, run="../../etc")
    expect(tab.locator(".notice")).to_contain_text("No such run")


def test_runs_beside_it_that_are_not_there_are_said(page: Page, board: str) -> None:
    tab = opened(page, board, run="bad", baseline="gone", reference="", view="map")
    expect(tab.locator(".notes")).to_contain_text("Baseline gone is not under the logdir, so the page does not use it.")
    at_step(tab, 790)

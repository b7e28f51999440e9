"""Metrics of a tensor over the steps, above the loss: what is shown is what was recorded."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cast_records import (
    DELAYED,
    EVERY,
    FLOAT32,
    HOSTILE,
    LOST,
    RECAST,
    RECAST_AT,
    SKIPPED,
    SPARSE,
    SPARSE_STEPS,
    SPIKE,
    STEPS,
)
from playwright.sync_api import Page, expect

from nemo_fp8_debug.record.reader import find_record, read_table_rows

Shown = Callable[..., Page]


@pytest.fixture
def shown(casts_shown: Shown) -> Shown:
    def open_on(**state: object) -> Page:
        state = {
            "view": "timeline",
            "run": DELAYED,
            "baseline": "quiet",
            "layer": "first",
            "role": "input",
            "step": 20,
        } | state
        page = casts_shown(**state)
        page.locator("canvas").wait_for()
        page.get_by_text("Reading the record").wait_for(state="detached")
        return page

    return open_on


def taken_away(page: Page) -> list[dict[str, Any]]:
    """The rows of the charts' CSV, numbers as such."""
    with page.expect_download() as download:
        page.locator("figure button", has_text="CSV").click()
    found = csv.DictReader(io.StringIO(Path(download.value.path()).read_text(), newline=""))
    return [{k: v if k == "run" else None if v == "" else float(v) for k, v in row.items()} for row in found]


def address_has(page: Page, **state: object) -> None:
    """Wait until the address has these values; None: none."""
    wanted = {f"p.fp8.{name}": None if value is None else str(value) for name, value in state.items()}
    page.wait_for_function(
        """wanted => {
          const at = new URLSearchParams(location.hash.slice(1));
          return Object.entries(wanted).every(([name, value]) => at.get(name) === value);
        }""",
        arg=wanted,
    )


def test_all_values_are_those_of_the_records(shown: Shown, casts: Path) -> None:
    metrics = ["underflow_pct", "relative_error", "scale_ratio_log2", "amax"]
    rows = taken_away(shown())
    assert list(rows[0]) == ["run", "step", "loss", "grad_norm", *metrics]
    for name in (DELAYED, "quiet"):
        run, mine = find_record(casts / name), [row for row in rows if row["run"] == name]
        losses = read_table_rows(run, "steps", ["step", "loss"])
        assert [(row["step"], row["loss"]) for row in mine] == losses.rows()
        sampled = read_table_rows(run, "metrics", ["step", *metrics], {"layer": "first", "role": "input"})
        assert len(sampled) >= STEPS // EVERY
        at = {row["step"]: tuple(row[metric] for metric in metrics) for row in mine if row["amax"] is not None}
        assert at == {row[0]: row[1:] for row in sampled.rows()}


def test_metrics_are_chosen_and_a_link_keeps_them(shown: Shown, casts: Path) -> None:
    page = shown(metrics="sqnr_db,nonsense")
    page.locator("summary", has_text="Charts: the loss").click()
    page.locator("[data-metric-choice=kurtosis]").check()
    page.locator("[data-metric-choice=grad_norm]").check()
    page.locator("[data-metric-choice=sqnr_db]").uncheck()
    address_has(page, metrics="grad_norm,kurtosis")
    page.reload()
    page.locator("canvas").wait_for()
    page.get_by_text("Reading the record").wait_for(state="detached")
    rows = [row for row in taken_away(page) if row["run"] == DELAYED]
    assert list(rows[0]) == ["run", "step", "loss", "grad_norm", "kurtosis"]
    assert [row["grad_norm"] for row in rows] == [float(step) for step in range(STEPS)]
    recorded = read_table_rows(
        find_record(casts / DELAYED), "metrics", ["step", "kurtosis"], {"layer": "first", "role": "input"}
    )
    assert [(row["step"], row["kurtosis"]) for row in rows if row["kurtosis"] is not None] == recorded.rows()


def test_spikes_triggers_and_skipped_steps_are_told(shown: Shown, casts: Path) -> None:
    page = shown()
    steps = read_table_rows(find_record(casts / DELAYED), "steps", ["step", "trigger"])
    ((step, why),) = steps.filter(pl.col("trigger").is_not_null()).rows()
    marks = page.locator("[data-table=events] tbody tr", has_text=DELAYED)
    told = {kind: marks.and_(page.locator(f"[data-event={kind}]")) for kind in ("spike", "trigger", "skipped")}
    assert str(SPIKE) in told["spike"].locator("button").all_inner_texts()
    assert [text.strip() for text in told["trigger"].locator("td").all_inner_texts()] == [
        str(step),
        DELAYED,
        "triggered sample",
        why,
    ]
    assert told["skipped"].locator("button").all_inner_texts() == [str(SKIPPED)]
    told["trigger"].locator("button").click()
    address_has(page, step=step)
    expect(page.locator(".steps output")).to_have_text(f"step {step}")


def test_a_click_into_any_chart_goes_to_the_sampled_step_there(shown: Shown) -> None:
    page = shown(step=4, metrics="underflow_pct")
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    box = page.locator("canvas").bounding_box()
    assert box
    plot = box["x"] + 70, box["x"] + box["width"] - 24
    for y in (box["y"] + 120, box["y"] + box["height"] - 130):
        for share, step in ((0.35, 14), (0.9, 36)):
            page.mouse.click(plot[0] + share * (plot[1] - plot[0]), y)
            address_has(page, step=step)


def test_the_zoom_is_kept_in_the_address(shown: Shown) -> None:
    page = shown()
    page.locator("[data-zoom=from]").fill("12")
    page.locator("[data-zoom=from]").press("Enter")
    address_has(page, **{"from": 12, "to": None})
    page.locator("[data-zoom=to]").fill("33")
    page.locator("[data-zoom=to]").press("Enter")
    address_has(page, **{"from": 12, "to": 33})
    page.reload()
    expect(page.locator("[data-zoom=to]")).to_have_value("33")
    page.get_by_role("button", name="All steps").click()
    address_has(page, **{"from": None, "to": None})


def test_a_run_without_the_tensor_leaves_the_others_be(shown: Shown, casts: Path) -> None:
    page = shown(baseline="other")
    expect(page.locator("main .notes")).to_contain_text("other: ")
    assert {row["run"] for row in taken_away(page) if row["amax"] is not None} == {DELAYED}
    assert {row["run"] for row in taken_away(page)} == {DELAYED, "other"}


def test_how_a_tensor_was_cast_is_told_without_a_loss(casts_shown: Shown) -> None:
    page = casts_shown(view="distribution", run=RECAST, layer="first", role="input")
    page.route("**/loss?*", lambda route: route.abort())
    page.get_by_role("tab", name="Timeline").click()
    expect(page.locator("main .notes")).to_contain_text("does not answer")
    expect(page.locator("[data-event=change] button")).to_have_text([str(RECAST_AT)])
    expect(page.locator("[data-event=change]")).to_contain_text("under current-hybrid")


def test_without_a_tensor_there_is_the_loss(casts_shown: Shown) -> None:
    """The verdict names none of a run that is not quantized."""
    page = casts_shown(view="timeline", run=FLOAT32)
    expect(page.locator(".notice")).to_contain_text("No tensor chosen")
    page.locator("canvas").wait_for()
    assert list(taken_away(page)[0]) == ["run", "step", "loss", "grad_norm"]


def test_a_hostile_name_is_shown_as_text(shown: Shown) -> None:
    page = shown(layer=HOSTILE)
    expect(page.locator("[data-picker=tensor]")).to_have_value(f"X of {HOSTILE}")
    page.locator(".headline[data-stage=all]").wait_for()  # which moves what is below it
    box = page.locator("canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
    expect(page.locator(".tip")).to_contain_text("largest magnitude")
    assert page.locator("img").count() == 0 and page.evaluate("window.hacked") is None


def test_losses_of_other_steps_than_metrics_are_lines(casts_shown: Shown) -> None:
    """Broken where they are not numbers, and nowhere else."""
    state = {"run": SPARSE, "baseline": "", "reference": "", "layer": "first", "role": "input"}
    page = casts_shown(view="timeline", metrics="grad_norm", **state)
    page.locator("[data-drawn]").wait_for()
    page.get_by_text("Reading the record").wait_for(state="detached")
    loss, norm = columns_drawn(page, 0, 0.5), columns_drawn(page, 0.5, 1)
    first, last = loss.index(True), len(loss) - 1 - loss[::-1].index(True)
    assert is_drawn(loss[first:last])
    gap = [first + round((last - first) * step / SPARSE_STEPS) for step in (LOST.start, LOST.stop)]
    assert is_drawn(norm[first : gap[0] - 8]) and is_drawn(norm[gap[1] + 8 : last])
    assert not any(norm[gap[0] + 8 : gap[1] - 8])


def is_drawn(columns: list[bool]) -> bool:
    """Whether a line goes through all columns, but for some that it crosses between two pixels."""
    return sum(columns) > 0.97 * len(columns)


def columns_drawn(page: Page, top: float, bottom: float) -> list[bool]:
    """For each column of pixels in a part of the chart whether any of them has the run's color."""
    found: list[bool] = page.locator("canvas").evaluate(
        """(canvas, [top, bottom]) => {
          const wanted = [0xd5, 0x5e, 0x00];
          const {width, height} = canvas;
          const from = Math.round(top * height);
          const rows = Math.round(bottom * height) - from;
          const {data} = canvas.getContext('2d').getImageData(0, from, width, rows);
          return Array.from({length: width}, (_, x) => {
            for (let y = 0; y < rows; y++) {
              const at = 4 * (y * width + x);
              if (data[at + 3] > 60 && wanted.every((value, i) => Math.abs(data[at + i] - value) < 40)) return true;
            }
            return false;
          });
        }""",
        [top, bottom],
    )
    return found

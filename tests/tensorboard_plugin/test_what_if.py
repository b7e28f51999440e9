"""The What if view in a real Chromium, against the record's own tables and replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import polars as pl
import pytest
from playwright.sync_api import Locator, Page, expect
from shown import number, taken_away, title
from verdict_records import CULPRIT, HOSTILE

from nemo_fp8_debug.analysis.recommendation.options import Budget, WorstErrors
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.numerics.recipe import parse_recipe

Open = Callable[..., Page]
STEP = 60
BAD = {"view": "what_if", "run": "bad", "baseline": "", "reference": "", "step": STEP}
#: milliseconds that a job may take, on a busy machine
SOON = 60_000
Values = dict[str, dict[str, float | None]]


@pytest.fixture(scope="module")
def run(logdir: Path) -> Run:
    return Run.read(logdir / "bad")


def recorded(run: Run, metric: str) -> Values:
    """By tensor and recipe."""
    found: Values = {}
    for rows, name in ((run.metrics.read_all_rows(), "in use"), (run.unused_recipe_metrics, None)):
        for row in rows.filter(pl.col("step") == STEP).to_dicts():
            found.setdefault(title(row), {})[name or row["recipe"]] = row[metric]
    return found


def recipes(page: Page) -> Locator:
    found = page.locator("div.table")
    found.locator("tbody tr").first.wait_for()
    return found


def values(page: Page) -> Values:
    """Of the table that is shown, all digits."""
    (_, *names), *rows = taken_away(page, recipes(page))
    names = [name.partition(" delayed")[0] if name.startswith("in use") else name for name in names]
    return {row[0]: dict(zip(names, map(number, row[1:]), strict=True)) for row in rows}


@pytest.mark.parametrize("metric", ["relative_error", "underflow_pct", "overflow_pct", "mse"])
def test_the_numbers_are_those_of_the_record_and_the_worst_comes_first(frame: Open, run: Run, metric: str) -> None:
    expected = recorded(run, metric)
    found = values(frame(**BAD, metric=metric))
    assert found == expected and len({name for row in found.values() for name in row}) == 3
    in_use = [row["in use"] or 0.0 for row in found.values()]
    assert in_use == sorted(in_use, reverse=True)


def test_what_is_above_the_limit_and_what_is_least_is_marked_by_more_than_color(frame: Open, run: Run) -> None:
    page = frame(**BAD, metric="underflow_pct")
    expected = recorded(run, "underflow_pct")
    for row in recipes(page).locator("tbody tr").all():
        name = row.locator("td").first.inner_text()
        least = min(value for value in expected[name].values() if value is not None)
        some = len(set(expected[name].values())) > 1
        for cell in row.locator("td[data-recipe]").all():
            value = expected[name][cell.get_attribute("data-recipe") or ""]
            assert value is not None
            assert cell.get_by_role("img", name="above the limit").count() == (value > Budget().underflow_pct)
            assert cell.get_by_role("img", name="lowest of the row").count() == (some and value == least)
    worst, calm = (recipes(page).locator("tbody tr").nth(i).locator("td[data-recipe]").first for i in (0, -1))
    colors = [cell.evaluate("cell => getComputedStyle(cell).backgroundColor") for cell in (worst, calm)]
    assert colors == ["rgb(254, 232, 56)", "rgb(0, 34, 78)"]


def test_the_share_within_the_limits_is_that_of_the_budget(frame: Open, run: Run) -> None:
    page = frame(**BAD)
    shown = recipes(page).locator("tr.summary td").all_inner_texts()
    metrics = ("relative_error", "underflow_pct", "overflow_pct")
    others = run.unused_recipe_metrics.filter(pl.col("step") == STEP)
    by_recipe = [others.filter(recipe=recipe) for recipe in others["recipe"].unique(maintain_order=True)]
    tables = [run.metrics.read_all_rows().filter(pl.col("step") == STEP), *by_recipe]
    for text, rows in zip(shown, tables, strict=True):
        kept = [Budget().is_met_by_errors(WorstErrors(*errors)) for errors in rows.select(metrics).rows()]
        assert f"({sum(kept)} of {len(kept)})" in text
    known = Budget()
    limits = f"relative error {known.relative_error:g}, underflow {known.underflow_pct:g}%, overflow {known.overflow_pct:g}%"
    expect(page.get_by_text("lowest of the row. Limits:")).to_contain_text(limits)


def test_another_recipe_is_tried_from_the_histograms(frame: Open, logdir: Path) -> None:
    page = frame(**BAD, metric="underflow_pct")
    page.locator("[data-picker=scaling]").select_option("delayed")
    page.locator("[data-picker=format]").select_option("e5m2")
    page.locator("[data-picker=margin]").fill("2")
    assert page.locator("[data-picker=history]").input_value() == "4"
    what_if = page.get_by_role("button", name="Try", exact=True)
    page.route("**/what_if?*", lambda route: route.abort())
    what_if.click()
    expect(page.get_by_role("alert")).to_contain_text("could not be tried")
    page.unroute("**/what_if?*")
    what_if.click()
    wanted = parse_recipe("delayed-e5m2(margin=2,amax_history_len=4)").name
    page.locator(f"td[data-recipe='{wanted}']").first.wait_for()
    expected = {title(row): row["underflow_pct"] for row in replay(logdir / "bad", wanted, steps=[STEP]).to_dicts()}
    assert {name: row[wanted] for name, row in values(page).items()} == expected
    page.wait_for_function("wanted => decodeURIComponent(location.hash).includes('p.fp8.what_if=' + wanted)", arg=wanted)
    page.get_by_role("button", name=f"Leave {wanted} out").click()
    expect(page.locator(f"td[data-recipe='{wanted}']")).to_have_count(0)


def test_operand_and_search_are_in_the_address(frame: Open, run: Run) -> None:
    page = frame(**BAD)
    recipes(page)
    page.locator("[data-picker=only]").select_option("input")
    page.locator("[data-picker=find]").fill(CULPRIT)
    expect(recipes(page).locator("tbody tr")).to_have_count(1)
    assert list(values(page)) == [f"X of {CULPRIT}"]
    page.wait_for_function("location.hash.includes('p.fp8.find=') && location.hash.includes('p.fp8.only=input')")
    again = frame(**dict(part.removeprefix("p.fp8.").split("=") for part in unquote(page.url).partition("#")[2].split("&")))
    assert list(values(again)) == [f"X of {CULPRIT}"]


def test_a_record_of_one_recipe_says_how_to_weigh_others(frame: Open) -> None:
    page = frame(view="what_if", run="baseline", baseline="", reference="")
    expect(page.get_by_text("No other recipe was tried")).to_be_visible()
    expect(page.get_by_text('what_if=["current"')).to_be_visible()
    assert page.get_by_role("button", name="Try", exact=True).is_visible()


def test_hostile_names_are_text(frame: Open) -> None:
    page = frame(view="what_if", run=HOSTILE, baseline="", reference="")
    expect(page.get_by_role("link", name="W of <b>other</b>")).to_be_visible()
    expect(page.locator("caption")).to_contain_text(HOSTILE)
    assert page.locator("#view img, #view b").count() == 0 and not page.evaluate("window.hacked")

"""The report and the exported folder, opened from file:// in a real Chromium, against the commands and the record."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from browser import window
from playwright.sync_api import Browser, Page, expect
from shown import said
from typer.testing import CliRunner
from verdict_records import CULPRIT

from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record.reader import read_table_rows

PARTS = ("baseline", "bad", "reference")


@contextmanager
def opened(browser: Browser, file: Path, **options: Any) -> Iterator[Page]:
    """A page that loads files alone, all of them there, and complains of nothing."""
    context = window(browser)
    page = context.new_page()
    page.emulate_media(**options)
    wrong: list[str] = []
    page.add_init_script("window.hack = () => { window.hacked = true; }")
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.on("request", lambda request: None if re.match("file:|data:|blob:", request.url) else wrong.append(request.url))
    page.goto(file.as_uri())
    yield page
    assert wrong == [] and page.evaluate("window.hacked") is None
    context.close()


@pytest.fixture(scope="module")
def report(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    paths = [logdir / "bad", logdir / "again", "--baseline", logdir / "baseline", "--reference", logdir / "reference"]
    result = CliRunner().invoke(app, ["compare", *map(str, paths), "--html", str(file)])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture(scope="module")
def exported(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "page"
    result = CliRunner().invoke(app, ["view", *(str(logdir / part) for part in PARTS), "--export", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"open {folder / 'index.html'}" in result.output.replace("\n", "")
    return folder / "index.html"


@pytest.fixture(scope="module")
def diagnosis(logdir: Path) -> Any:
    return said("diagnose", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "reference")


def recorded(logdir: Path, run: str, role: str, layer: str, metric: str) -> dict[int, float]:
    rows = read_table_rows(logdir / run, "metrics").filter(pl.col("layer") == layer, pl.col("role") == role)
    rows = rows.filter(pl.col("scale_source") != "what-if")
    return dict(rows.select("step", metric).iter_rows())


def shown_metrics(page: Any) -> dict[str, float]:
    cells = page.locator("[data-metric][data-of='in use']").all()
    return {str(cell.get_attribute("data-metric")): float(cell.get_attribute("data-value")) for cell in cells}


class TestReport:
    def test_it_says_and_draws_what_the_commands_found(
        self, browser: Browser, report: Path, logdir: Path, diagnosis: Any
    ) -> None:
        comparison = said("compare", logdir / "bad", "--baseline", logdir / "baseline", "--reference", logdir / "reference")
        with opened(browser, report) as page:
            assert page.locator("article > h1").all_inner_texts() == ["bad against baseline", "again against baseline"]
            page.locator(".report-figure").last.locator("[data-drawn]").first.wait_for()
            figures = page.locator("article").first.locator(".report-figure")
            figures.last.locator("[data-drawn]").first.wait_for()
            verdict = figures.first
            verdict.locator("table").last.wait_for(state="attached")
            told = str(verdict.text_content())
            assert diagnosis["verdict"] in told and comparison["verdict"] in told
            views = [figure.get_attribute("data-view") for figure in figures.all()]
            assert views[0] == "verdict" and {"map", "timeline", "distribution"} <= set(views)
            culprit, since = diagnosis["culprit"], diagnosis["culprit"]["since"]
            values = page.locator(f"section[data-view=distribution]:has-text('X of {CULPRIT}')").first
            found = shown_metrics(values)
            for metric in ("underflow_pct", "relative_error"):
                exact = recorded(logdir, "bad", culprit["role"], culprit["layer"], metric)[since]
                assert found[metric] == pytest.approx(exact, rel=1e-9)
            assert f"at step {since}" in values.inner_text()
            assert page.locator(".problem").count() == 0

    def test_it_is_small(self, report: Path) -> None:
        assert report.stat().st_size < 2_000_000

    def test_on_paper_it_is_black_on_white_and_as_wide_as_a_page(self, browser: Browser, report: Path) -> None:
        with opened(browser, report, color_scheme="dark") as page:
            page.locator(".report-figure").last.locator("[data-drawn]").first.wait_for()
            darkest = """() => {
              const canvas = document.querySelector('[data-view=timeline] canvas');
              const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
              let least = 255;
              for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] === 255) least = Math.min(least, Math.max(data[i], data[i + 1], data[i + 2]));
              }
              return least;
            }"""
            assert page.evaluate(darkest) > 60  # light ink on dark ground
            page.evaluate("addEventListener('beforeprint', () => { window.printed = true; })")
            page.evaluate(f"addEventListener('beforeprint', () => {{ window.ink = ({darkest})(); }})")
            page.evaluate("addEventListener('beforeprint', () => { window.wide = document.body.scrollWidth; })")
            assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
            assert page.evaluate("window.printed") and page.evaluate("window.ink") < 60
            assert page.evaluate("window.wide") <= 182 / 25.4 * 96 + 1
            page.emulate_media(media="print")
            assert not page.locator(".chart-tools, [data-picker], [data-zoom]").locator("visible=true").count()

    def test_links_lead_to_figures_of_the_report(self, browser: Browser, report: Path) -> None:
        with opened(browser, report) as page:
            page.locator(".report-figure").last.locator("[data-drawn]").first.wait_for()
            page.locator("section[data-view=verdict] a", has_text=CULPRIT).first.click()
            page.wait_for_function(
                "() => { const {top} = document.querySelector('[data-view=timeline]').getBoundingClientRect();"
                " return top >= 0 && top < innerHeight; }"
            )


def test_a_file_that_exists_is_kept_and_what_to_do_is_said(logdir: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("mine")
    result = CliRunner().invoke(
        app, ["compare", str(logdir / "bad"), "--baseline", str(logdir / "baseline"), "--html", str(file)]
    )
    assert (result.exit_code, result.stdout, file.read_text()) == (1, "", "mine")
    assert "exists and is not overwritten; give --html another name, or delete the file first" in result.stderr
    missing = tmp_path / "none" / "report.html"
    result = CliRunner().invoke(
        app, ["compare", str(logdir / "bad"), "--baseline", str(logdir / "baseline"), "--html", str(missing)]
    )
    assert result.exit_code == 1 and f"there is no folder {missing.parent}" in result.stderr


class TestExport:
    def test_every_view_answers_from_the_folder(
        self, browser: Browser, exported: Path, logdir: Path, diagnosis: Any
    ) -> None:
        with opened(browser, exported) as page:

            def look(**state: object) -> None:
                keys = {"run": "bad", "baseline": "baseline", "reference": "reference"} | state
                page.evaluate("hash => { location.hash = hash; }", "&".join(f"p.fp8.{k}={v}" for k, v in keys.items()))
                page.locator(f"[aria-selected=true]#tab-{state['view']}").wait_for()

            look(view="verdict")
            page.locator("main table").last.wait_for(state="attached")
            assert diagnosis["verdict"] in str(page.locator("main").text_content())
            look(view="map", metric="underflow_pct", step=40)
            page.locator("[data-panel=run] [data-drawn='40']").wait_for()
            worst = page.locator("[data-panel=run]")
            layer, role = worst.get_attribute("data-layer"), worst.get_attribute("data-role")
            assert float(str(worst.get_attribute("data-value"))) == pytest.approx(
                recorded(logdir, "bad", str(role), str(layer), "underflow_pct")[40], rel=1e-6
            )
            look(view="timeline", layer="up", role="weight", metrics="mse,amax")
            page.locator("main [data-drawn]").wait_for()
            with page.expect_download() as download:
                page.locator(".chart-tools button", has_text="CSV").click()
            rows = csv.DictReader(io.StringIO(Path(download.value.path()).read_text()))
            amax = {int(row["step"]): float(row["amax"]) for row in rows if row["run"] == "bad" and row["amax"]}
            exact = recorded(logdir, "bad", "weight", "up", "amax")
            assert amax == pytest.approx(exact, rel=1e-6) and len(amax) > 20
            look(view="course", reference="", pinned="reference", show="also%20reference", metric="amax")
            page.locator("[data-drawn='amax also reference 0 92']").wait_for()
            expect(page.get_by_label("Do not show reference")).to_be_visible()
            assert page.locator(".problem").count() == 0
            look(view="distribution", layer=CULPRIT, role="input", step=diagnosis["culprit"]["since"])
            page.locator("[data-metric=underflow_pct]").first.wait_for()
            assert f"at step {diagnosis['culprit']['since']}" in page.locator("main").inner_text()
            exact = recorded(logdir, "bad", "input", CULPRIT, "underflow_pct")[diagnosis["culprit"]["since"]]
            assert shown_metrics(page)["underflow_pct"] == pytest.approx(exact, rel=1e-9)
            look(view="what_if")
            page.locator("main table").wait_for()
            assert "mxfp8" in page.locator("main table").inner_text()
            assert "This page has no server to try" in page.locator("main").inner_text()
            look(view="fingerprints")
            page.locator("main table").wait_for()
            assert page.locator(".problem").count() == 0
            look(view="verdict", baseline="reference", reference="")
            page.locator(".problem").wait_for()
            assert "nemo-fp8-debug view" in page.locator(".problem").inner_text()

    def test_it_says_what_is_in_it(self, browser: Browser, exported: Path) -> None:
        with opened(browser, exported) as page:
            page.locator("main .notes").wait_for()
            told = page.locator("main .notes").inner_text()
            assert "27 of 27 tensors" in told and "start the server" in told

    def test_a_file_that_is_missing_is_named(self, browser: Browser, exported: Path, tmp_path: Path) -> None:
        data = json.loads((exported.parent / "data.js").read_text().partition("= ")[2].rstrip(";"))
        file = next(file for name, file in data["files"].items() if name.startswith("verdict?"))
        kept = exported.parent / f"{file}.kept"
        (exported.parent / file).rename(kept)
        try:
            page = window(browser).new_page()
            page.goto(f"{exported.as_uri()}#p.fp8.view=verdict")
            page.get_by_text(f"{file} is unreadable. Check that the folder is complete.").first.wait_for()
        finally:
            kept.rename(exported.parent / file)

    def test_a_folder_that_exists_is_kept(self, exported: Path, logdir: Path) -> None:
        result = CliRunner().invoke(app, ["view", str(logdir), "--export", str(exported.parent)])
        assert result.exit_code == 1 and "give --export another folder" in result.stderr.replace("\n", " ")

"""Take the screenshots of the docs in headless Chromium: TensorBoard with the runs of a demo, and a report.

`.venv/bin/python scripts/screenshots.py runs/demo`

The demo must end with the same verdict as the committed records, because the docs quote that verdict.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import browser
from playwright.sync_api import Page

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.tensorboard_plugin.web import link

RECORDS = Path(__file__).parent / "validation" / "main_job" / "records"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = {"width": 1500, "height": 1000}
#: views of the tab, each with a selector of what must be drawn
VIEWS = {
    "map": "[data-panel=run] [data-drawn]",
    "course": "[data-drawn*=underflow]",
    "timeline": "[data-drawn]",
    "distribution": "[data-drawn]",
    "what_if": "table",
    "verdict": ".columns table",
    "fingerprints": "table",
}


def main() -> None:
    runs = Path(sys.argv[1])
    if verdict_of(runs) != verdict_of(RECORDS):  # another CPU may sum in another order
        sys.exit(f"The verdicts of {runs} and {RECORDS} differ; make new records: scripts/validation/main_job/train.py")
    IMAGES.mkdir(exist_ok=True)
    with browser.tensorboard("--logdir", runs) as address, browser.chromium() as chromium:

        def take(name: str, show: Callable[[Page], None]) -> None:
            page = chromium.new_page(viewport=SIZE)
            page.set_default_timeout(browser.PATIENCE_MS)
            show(page)
            page.wait_for_timeout(1500)
            page.screenshot(path=IMAGES / f"{name}.png")
            page.close()

        state = {"run": "stuck_scale", "baseline": "baseline", "reference": "", "metric": "underflow_pct", "step": 230}
        state |= first_tensor(runs / "stuck_scale", runs / "baseline")
        for view, ready in VIEWS.items():
            take(f"tab_{view}", lambda page, v=view, r=ready: tab(page, link(address, view=v, **state), r))
        dark = link(address, view="distribution", **state).replace("/#", "/?darkMode=true#")
        take("tab_dark", lambda page: tab(page, dark, VIEWS["distribution"]))
        take("custom_scalars", lambda page: others(page, f"{address}/#custom_scalars"))
        take("compare", lambda page: comparison(page, runs))


def verdict_of(runs: Path) -> object:
    """Return the headline of the verdict on the run that FP8 breaks."""
    return diagnose(runs / "stuck_scale", runs / "baseline").to_json()["headline"]


def first_tensor(run: Path, baseline: Path) -> dict[str, str]:
    """Return the tensor that the verdict names."""
    first = story(diagnose(run, baseline))["headline"]["first"]
    return {name: first[name] for name in ("layer", "role")}


def tab(page: Page, address: str, ready: str) -> None:
    page.goto(address)
    shown = page.frame_locator("iframe")
    shown.locator(".headline[data-stage=all]").wait_for(timeout=120_000)
    shown.locator(f"#view[data-view] {ready}").first.wait_for(timeout=120_000)


def others(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_timeout(8000)


def comparison(page: Page, runs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        command = Path(sys.executable).with_name("nemo-fp8-debug")
        arguments = ["compare", runs / "stuck_scale", "--baseline", runs / "baseline", "--html", report]
        subprocess.run([command, *arguments], check=True, stdout=subprocess.DEVNULL)
        page.goto(report.as_uri())
        page.locator(".report-figure").last.locator("[data-drawn]").first.wait_for(timeout=120_000)


if __name__ == "__main__":
    main()

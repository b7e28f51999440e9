"""Take screenshots of every view of the tab in three window sizes, light and dark, and join them into one picture per view.

`.venv/bin/python scripts/contact_sheets.py runs/demo --output sheets`
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import browser
from PIL import Image
from playwright.sync_api import Browser, Page

from nemo_fp8_debug.tensorboard_plugin.web import link

#: width and height of windows
SIZES = ((1024, 768), (1440, 900), (2560, 1440))
#: for each theme, what to append to TensorBoard's address
THEMES = {"light": "", "dark": "/?darkMode=true&"}
VIEWS = ("verdict", "course", "map", "timeline", "distribution", "what_if", "runs", "fingerprints")
#: pixels between two pictures
GAP = 24
#: milliseconds to wait after the last response, so that the view is drawn
PAUSE_MS = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logdir", nargs="?", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("contact_sheets"), help="output folder; default: %(default)s")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[Image.Image]]] = {view: [] for view in VIEWS}
    with browser.tensorboard("--logdir", arguments.logdir) as address, browser.chromium() as chromium:
        for theme in THEMES.values():
            pages = [opened(chromium, address + theme, *size) for size in SIZES]
            for view in VIEWS:
                rows[view].append([picture(page, view) for page in pages])
            for page in pages:
                page.close()
    for view, pictures in rows.items():
        path = arguments.output / f"{view}.png"
        joined(pictures).save(path)
        print(path)


def opened(chromium: Browser, address: str, width: int, height: int) -> Page:
    """Open the tab with the verdict, and select the first tensor that the verdict names."""
    page = chromium.new_page(viewport={"width": width, "height": height})
    page.goto(link(address, view="verdict"))
    tab = page.frame_locator("iframe")
    tab.locator(".headline[data-stage=all], .headline[data-stage=failed]").wait_for(timeout=browser.PATIENCE_MS)
    first = tab.locator(".headline .named a")
    if first.count():
        first.first.click()
    return page


def picture(page: Page, view: str) -> Image.Image:
    """Return a screenshot of the window with a view."""
    tab = page.frame_locator("iframe")
    tab.locator(f"#tab-{view}").click()
    tab.locator(f"#view[aria-labelledby=tab-{view}]").wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(PAUSE_MS)
    return Image.open(io.BytesIO(page.screenshot()))


def joined(rows: list[list[Image.Image]]) -> Image.Image:
    """Join rows of pictures into one picture, on gray."""
    width = max(sum(one.width + GAP for one in row) for row in rows) + GAP
    height = sum(max(one.height for one in row) + GAP for row in rows) + GAP
    sheet = Image.new("RGB", (width, height), "gray")
    top = GAP
    for row in rows:
        left = GAP
        for one in row:
            sheet.paste(one, (left, top))
            left += one.width + GAP
        top += max(one.height for one in row) + GAP
    return sheet


if __name__ == "__main__":
    main()

"""Takes the screenshots of the docs: TensorBoard over a demo's folder, and the page of its comparison, in headless Chromium.

`apt-get install chromium; .venv/bin/pip install playwright==1.65.2; .venv/bin/python scripts/screenshots.py runs/demo`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PORT = 6123
IMAGES = Path(__file__).parents[1] / "docs" / "images"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]


def wait_for_server() -> None:
    for _ in range(60):
        try:
            urllib.request.urlopen(f"http://localhost:{PORT}/data/runs", timeout=2)
            return
        except OSError:
            time.sleep(1)
    raise SystemExit("TensorBoard did not start")


def scalars(page: Page) -> None:
    page.goto(f"http://localhost:{PORT}/?tagFilter=reduced_train_loss%7Cfp8%2F(underflow_pct%7Cmse)%2Finput#timeseries")
    page.wait_for_timeout(8000)
    page.screenshot(path=IMAGES / "scalars.png")


def custom_scalars(page: Page) -> None:
    page.goto(f"http://localhost:{PORT}/#custom_scalars")
    page.wait_for_timeout(8000)
    page.screenshot(path=IMAGES / "custom_scalars.png")


def fingerprint(page: Page) -> None:
    page.goto(f"http://localhost:{PORT}/#text")
    page.wait_for_timeout(6000)
    page.screenshot(path=IMAGES / "fingerprint.png")


def comparison(page: Page) -> None:
    runs = [Path(sys.argv[1]) / name for name in ("good", "bad")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        command = Path(sys.executable).with_name("nemo-fp8-debug")
        subprocess.run([command, "compare", *runs, "--html", report], check=True, stdout=subprocess.DEVNULL)
        page.goto(report.as_uri())
        page.wait_for_timeout(3000)
        page.screenshot(path=IMAGES / "compare.png")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    tensorboard = Path(sys.executable).with_name("tensorboard")
    server = subprocess.Popen([tensorboard, "--logdir", sys.argv[1], "--port", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        wait_for_server()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            for take in (scalars, custom_scalars, fingerprint, comparison):
                take(browser.new_page(viewport={"width": 1500, "height": 1000}))
            browser.close()
    finally:
        server.terminate()


if __name__ == "__main__":
    main()

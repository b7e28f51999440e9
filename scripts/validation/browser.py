"""A real TensorBoard, or the page served without it, and a real Chromium, without a screen."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from nemo_fp8_debug.tensorboard_plugin.page.server import make_bound_server
from nemo_fp8_debug.tensorboard_plugin.records.logdir import name_roots
from nemo_fp8_debug.tensorboard_plugin.web import link

CHROMIUM = Path(__file__).parents[2] / ".venv" / "chromium"
#: milliseconds after which a page is given up: far more than a slow and busy machine needs
PATIENCE_MS = 300_000
#: no display, no sandbox for root, and no connection but those of the page
_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


@contextlib.contextmanager
def tensorboard(*arguments: object) -> Iterator[str]:
    """The address of a TensorBoard started with `arguments`."""
    command = [Path(sys.executable).with_name("tensorboard"), "--port", "0", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        assert server.stdout
        try:
            for line in server.stdout:
                log.write(line)
                if found := re.search(r"at (http://\S+?)/? \(Press", line):
                    yield found[1].rstrip("/")
                    return
            log.seek(0)
            raise AssertionError(f"TensorBoard did not start: {log.read()}")
        finally:
            server.kill()
            server.wait()
            server.stdout.close()


@contextlib.contextmanager
def serving(*folders: object) -> Iterator[str]:
    """The address of the page of the runs below `folders`, as `nemo-fp8-debug view` serves it, from a thread."""
    with make_bound_server(name_roots(list(map(str, folders))), "127.0.0.1", 0) as started:
        thread = threading.Thread(target=started.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{started.port}/"
        finally:
            started.shutdown()
            thread.join()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(CHROMIUM / "al2023" / "lib")}
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM / "chromium", args=_FLAGS, env=environment, timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


def window(browser: Browser) -> BrowserContext:
    """Pages of a usual size that take the time they need."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000})
    context.set_default_timeout(PATIENCE_MS)
    return context


def open_tab(browser: Browser, address: str, **state: object) -> Page:
    """A page of TensorBoard on the FP8 tab; `page.frame_locator("iframe")` is what the plugin shows."""
    page = window(browser).new_page()
    page.goto(link(address, **state))
    page.frame_locator("iframe").locator("[role=tablist], .notice").first.wait_for()
    return page

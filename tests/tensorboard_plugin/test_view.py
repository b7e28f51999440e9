"""The page served without TensorBoard: a real process, asked over HTTP and shown in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import window
from playwright.sync_api import Browser
from processes import GUARD
from typer.testing import CliRunner

from nemo_fp8_debug.cli import app
from nemo_fp8_debug.tensorboard_plugin.web import names_this_server


@pytest.fixture(scope="module")
def process(logdir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Where it is, and its process."""
    command = [Path(sys.executable).with_name("nemo-fp8-debug"), "view", logdir / "bad", logdir / "baseline"]
    plain = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # which wraps what is printed
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=plain) as started:
        try:
            assert started.stdout
            found = re.search(r"at (http://127\.0\.0\.1:\d+/)", started.stdout.readline())
            assert found
            yield found[1], started
        finally:
            started.kill()


def get(address: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=GUARD) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_answers_as_the_tab_does(process: tuple[str, subprocess.Popen[str]]) -> None:
    address, _ = process
    status, listed = get(f"{address}data/plugin/fp8/runs")
    assert status == 200
    assert [run["name"] for run in json.loads(listed)["runs"]] == ["bad", "baseline"]
    assert json.loads(listed)["suggested"] == {"baseline": "baseline", "reference": None, "run": "bad"}
    assert get(f"{address}data/plugin/fp8/run?run=nobody")[0] == 404
    assert get(f"{address}data/plugin/fp8/other") == (
        404,
        b'{"error":"There is nothing at this address; the page is at /."}',
    )


def test_other_names_and_other_sites_are_refused(process: tuple[str, subprocess.Popen[str]]) -> None:
    address, _ = process
    port = address.rstrip("/").rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]"):
        assert get(f"{address}data/plugin/fp8/runs", Host=host)[0] == 200
    for host in (f"attacker.example:{port}", "localhost.attacker.example", "127.0.0.1.attacker.example", "[::1"):
        for place in ("", "data/plugin/fp8/runs", "data/plugin/fp8/page.js"):
            assert get(address + place, Host=host)[0] == 403
    assert get(f"{address}data/plugin/fp8/runs", Origin="http://attacker.example")[0] == 403


def test_the_name_that_it_is_bound_to_is_its_own() -> None:
    assert (
        names_this_server("node17:6006", "node17")
        and names_this_server("NODE17", "node17")
        and names_this_server("[fe80::1]:80", "node17")
    )
    assert not names_this_server("", "node17") and not names_this_server("node18:6006", "node17")


def test_the_page_shows_the_runs_and_follows_its_own_address(
    browser: Browser, process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, _ = process
    context = window(browser)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on(
        "request", lambda request: None if request.url.startswith((address, "data:", "blob:")) else wrong.append(request.url)
    )
    page.emulate_media(color_scheme="dark")
    page.goto(f"{address}#p.fp8.view=map&p.fp8.step=40")
    page.locator("[data-panel=run] [data-drawn='40']").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("tab", name="Fingerprints").click()
    page.locator("main table").wait_for()
    assert "p.fp8.view=fingerprints" in page.url and wrong == []
    context.close()


def test_ctrl_c_ends_it_without_a_word(process: tuple[str, subprocess.Popen[str]]) -> None:
    _, started = process
    started.send_signal(signal.SIGINT)
    assert started.wait(GUARD) == 0
    assert started.stdout and started.stderr
    before = started.stdout.read()  # what was printed as it began to serve
    assert before.startswith("\nNext: open http://") and before.count("\n") == 2 and started.stderr.read() == ""


def test_what_cannot_be_served_is_an_error_in_one_line(logdir: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["view", str(tmp_path / "none")])
    assert result.exit_code == 1 and "is not a folder" in result.stderr
    result = CliRunner().invoke(app, ["view", str(logdir), "--host", "192.0.2.1"])
    assert result.exit_code == 1 and "cannot listen at 192.0.2.1" in result.stderr
    result = CliRunner().invoke(app, ["view", str(tmp_path), "--export", str(tmp_path / "page")])
    assert result.exit_code == 1 and "no run record" in result.stderr and not (tmp_path / "page").exists()

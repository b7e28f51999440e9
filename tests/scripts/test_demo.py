"""The README's main job: three real NeMo runs, short ones, and what the records of long ones tell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from browser import chromium, serving, tensorboard, window
from playwright.sync_api import Browser, FrameLocator, Page, expect
from processes import GUARD, end_all, finished, found_in, wait_until

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story

ROOT = Path(__file__).parents[2]
#: of a job of full length, made by scripts/validation/main_job/train.py
RECORDS = ROOT / "scripts/validation/main_job/records"
STEPS = 40


@dataclass(frozen=True)
class Demo:
    """What the README's main job leaves behind."""

    output: Path
    printed: str


DEMO = (sys.executable, "-W", "ignore", ROOT / "scripts/demo.py", "--output")
ENVIRONMENT = os.environ | {"PYTHONPATH": found_in(ROOT / "recipes")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    output = tmp_path_factory.mktemp("demo") / "runs"
    with somebody_listening_on(6006):
        done = finished(*DEMO, output, "--steps", str(STEPS), env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return Demo(output, done.stdout)


@contextlib.contextmanager
def somebody_listening_on(port: int) -> Iterator[None]:
    with socket.socket() as listening:
        with contextlib.suppress(OSError):  # then somebody does
            listening.bind(("127.0.0.1", port))
            listening.listen()
        yield


def said(command: str, *arguments: str | Path) -> dict[str, Any]:
    """The JSON that a command of the package prints."""
    cli = Path(sys.executable).with_name("nemo-fp8-debug")
    found: dict[str, Any] = json.loads(finished(cli, command, *arguments, "--json").stdout)
    return found


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    return said("compare", RECORDS / "bad", "--baseline", RECORDS / "baseline", "--reference", RECORDS / "reference")


@pytest.fixture(scope="module")
def diagnosis() -> dict[str, Any]:
    return said("diagnose", RECORDS / "bad", "--baseline", RECORDS / "baseline", "--reference", RECORDS / "reference")


def test_the_bad_run_diverges_in_mid_run_and_the_good_one_does_not(comparison: dict[str, Any]) -> None:
    runs = comparison["runs"]
    assert runs["baseline"]["diverged_at"] is None
    assert 120 < runs["run"]["diverged_at"] < 300
    assert runs["run"]["final_loss"] > 1.2 * runs["baseline"]["final_loss"]


def test_compare_names_the_input_of_linear_fc2(comparison: dict[str, Any]) -> None:
    first = comparison["tensors"][0]
    assert first["layer"].endswith("mlp.linear_fc2")
    assert first["role"] == "input"
    assert first["mse_ratio"] >= 1000
    assert first["underflow_pct_run"] >= 10 * first["underflow_pct_baseline"]
    assert f"X of {first['layer']}" in comparison["verdict"]


def test_the_first_x_to_leave_the_baselines_band_is_among_the_farthest_apart(comparison: dict[str, Any]) -> None:
    """In which layer it is depends on how a CPU adds up: from then on the runs have nothing in common."""
    first = next(row for row in comparison["out_of_band"] if row["role"] == "input")
    far = {(t["layer"], t["role"]) for t in comparison["tensors"] if (t["mse_ratio"] or 0) >= 1000}
    assert (first["layer"], first["role"]) in far
    assert first["layer"].endswith("mlp.linear_fc2")
    assert comparison["out_of_band"][0]["onset"] > 120  # the runs are the same until then


def test_compare_says_whether_the_twin_diverged(comparison: dict[str, Any]) -> None:
    left = comparison["runs"]["reference"]["above_baseline_since"]
    assert left is not None
    assert f"The reference run diverged too, at step {left}." in comparison["verdict"]
    assert "so FP8 does not explain the loss" in comparison["verdict"]


def test_the_verdict_has_six_sentences(diagnosis: dict[str, Any], comparison: dict[str, Any]) -> None:
    since, verdict = comparison["runs"]["run"]["above_baseline_since"], diagnosis["verdict"]
    assert verdict.startswith("The learning rate is wrong at step 121 (high confidence). ")
    assert f" The loss diverged at step {since} and ended " in verdict and verdict.count(". ") == 5


def test_the_demo_ends_with_the_verdict_and_says_where_all_is(job: Demo) -> None:
    verdict, *ending = [line for line in job.printed.splitlines() if not line.startswith(("[", "Three runs"))][1:]
    bad, baseline, reference = (job.output / name for name in ("bad", "baseline", "reference"))
    assert verdict == said("diagnose", bad, "--baseline", baseline, "--reference", reference)["verdict"]
    assert "Port 6006 is taken, so this uses port 6007." in ending
    assert all(str(job.output / name) in ending[-1] for name in ("baseline", "bad", "reference"))


def test_progress_has_an_estimate_and_fits_a_terminal(job: Demo) -> None:
    lines = [line for line in job.printed.splitlines() if line.startswith("[")]
    assert any(re.search(rf"step \d+ of {STEPS}, about \d+ s left", line) for line in lines)
    assert max(map(len, lines)) <= 80


# Long tests rest on scripts/demo.py.
@pytest.mark.long
def test_ctrl_c_ends_the_runs(tmp_path: Path) -> None:
    with subprocess.Popen(
        list(map(str, (*DEMO, tmp_path / "runs"))), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as demo:
        try:
            assert demo.stdout
            wait_until(lambda: len(psutil.Process(demo.pid).children()) == 3)
            runs = psutil.Process(demo.pid).children()
            demo.send_signal(signal.SIGINT)
            assert demo.wait(GUARD) == 130
            assert not [run for run in runs if run.is_running()]
        finally:
            end_all(demo)


def test_diagnose_blames_no_operand_for_a_learning_rate(diagnosis: dict[str, Any]) -> None:
    assert (diagnosis["cause"], diagnosis["culprit"], diagnosis["harm"]) == ("learning_rate", None, "harmful")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(job: Demo, browser: Browser) -> Iterator[Page]:
    """What is at the address that the main job ends with, under the command that it ends with."""
    command, logdir = re.search(r"To see it:  (\S+) --logdir (\S+) --port 6007", job.printed).groups()  # type: ignore[union-attr]
    assert Path(command).exists()
    with tensorboard("--logdir", logdir) as address:
        page = window(browser).new_page()
        page.goto(printed_address(job).replace("http://localhost:6007", address))
        yield page


def printed_address(job: Demo) -> str:
    found = re.search(r"and open    (\S+)", job.printed)
    assert found
    return found[1]


def tab(page: Page) -> FrameLocator:
    return page.frame_locator("iframe")


def test_the_printed_address_opens_on_the_verdict_of_the_three_runs(page: Page, job: Demo) -> None:
    """What 40 steps show depends on the CPU: with some, a loss that rises in both runs hides the gap."""
    told = story(diagnose(*(job.output / name for name in ("bad", "baseline", "reference"))))["headline"]
    headline = tab(page).locator(".headline[data-stage=all]")
    headline.wait_for()
    shown = " ".join(headline.inner_text().split())
    assert told["title"] in shown and told["cause_told"] in shown
    expect(tab(page).get_by_role("tab", name="Verdict")).to_have_attribute("aria-selected", "true")
    state = parse_qs(urlsplit(page.url).fragment)
    assert [state[f"p.fp8.{name}"] for name in ("run", "baseline", "reference")] == [["bad"], ["baseline"], ["reference"]]


@pytest.fixture(scope="module")
def page_of_a_tensor(page: Page) -> Page:
    page.goto(f"{page.url}&p.fp8.layer=decoder.layers.1.mlp.linear_fc2&p.fp8.role=input")
    page.reload()
    return page


@pytest.mark.parametrize("view", ["Map", "Timeline", "Distribution", "What if", "Fingerprints"])
def test_every_view_opens(page_of_a_tensor: Page, view: str) -> None:
    shown = tab(page_of_a_tensor)
    shown.get_by_role("tab", name=view, exact=True).click()
    shown.locator(f"#view[data-view='{view}']").locator("[data-drawn]:visible, table:visible").first.wait_for()
    assert not shown.locator(".problem").count()


def test_the_headline_names_the_learning_rate_and_calls_the_first_tensor_a_consequence(browser: Browser) -> None:
    with serving(RECORDS) as address:
        page = window(browser).new_page()
        page.goto(f"{address}#p.fp8.run=bad&p.fp8.baseline=baseline&p.fp8.reference=reference")
        headline = page.locator(".headline[data-stage=all]")
        headline.wait_for()
        shown = " ".join(headline.inner_text().split())
    assert "not FP8" in shown and "The learning rate is wrong at step 121" in shown
    assert re.search(r"The loss diverged at step \d+", shown)
    assert re.search(r"First tensor, a consequence:?\s*X of decoder\.layers\.", shown)

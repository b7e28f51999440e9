"""The README's main job: real NeMo runs, short ones, and what the records of full length show."""

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

import numpy as np
import psutil
import pytest
from browser import chromium, serving, tensorboard, window
from playwright.sync_api import Browser, FrameLocator, Page, expect
from processes import GUARD, end_all, finished, found_in, wait_until

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.analysis.story.story import story

ROOT = Path(__file__).parents[2]
#: of a job of full length, made by scripts/validation/main_job/train.py
RECORDS = ROOT / "scripts/validation/main_job/records"
STEPS = 40
#: layer and role of the tensor that FP8 breaks
STUCK = ("decoder.layers.0.mlp.linear_fc2", "input")


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
def learning_rate() -> dict[str, Any]:
    baseline, reference = RECORDS / "baseline", RECORDS / "reference"
    return said("diagnose", RECORDS / "learning_rate", "--baseline", baseline, "--reference", reference)


@pytest.fixture(scope="module")
def stuck_scale() -> dict[str, Any]:
    return said("diagnose", RECORDS / "stuck_scale", "--baseline", RECORDS / "baseline")


class TestFullLength:
    """What `diagnose` and `compare` say of the demo's runs of full length."""

    def test_a_rising_learning_rate_is_named_and_fp8_is_not_blamed(self, learning_rate: dict[str, Any]) -> None:
        named = (learning_rate["cause"], learning_rate["culprit"], learning_rate["harm"])
        assert named == ("learning_rate", None, "harmful")
        assert learning_rate["verdict"].startswith("The learning rate is wrong at step 81 (high confidence). ")
        assert re.search(r"The reference run (diverged|departed from the baseline's) too", learning_rate["verdict"])
        assert "so FP8 does not explain the loss" in learning_rate["verdict"]

    def test_a_stuck_scale_is_named_with_tensor_cause_and_step(self, stuck_scale: dict[str, Any]) -> None:
        culprit = stuck_scale["culprit"]
        assert (culprit["layer"], culprit["role"]) == STUCK
        assert (stuck_scale["cause"], stuck_scale["harm"]) == ("corrupted_scale", "harmful")
        assert abs(culprit["since"] - 120) <= 10
        assert "cast X of decoder.layers.0.mlp.linear_fc2 in current-hybrid" in stuck_scale["verdict"]

    @pytest.mark.parametrize("baseline", ["baseline", None])
    def test_a_reference_of_another_learning_rate_acquits_nobody(self, baseline: str | None) -> None:
        """The reference run of the other bad run diverges, which says nothing about this one."""
        against = baseline and RECORDS / baseline
        found = diagnose(RECORDS / "stuck_scale", against, RECORDS / "reference")
        assert found.cause == diagnose(RECORDS / "stuck_scale", against).cause != "software"
        assert any("another learning rate than this run from step 90 on" in note for note in found.notes)
        assert not any(
            "left out" in note or "leave it out" in note
            for note in diagnose(RECORDS / "learning_rate", against, RECORDS / "reference").notes
        )

    def test_underflow_is_that_of_the_classic_picture(self) -> None:
        found = said("compare", RECORDS / "stuck_scale", "--baseline", RECORDS / "baseline")["tensors"][0]
        assert (found["layer"], found["role"]) == STUCK
        assert found["underflow_pct_run"] > 80 and found["underflow_pct_baseline"] < 1

    def test_the_advised_change_brings_the_loss_back(self, stuck_scale: dict[str, Any]) -> None:
        bad, rescued = (diagnose(RECORDS / name, RECORDS / "baseline").loss for name in ("stuck_scale", "rescued"))
        assert bad.gap and rescued.gap and bad.gap.paired and rescued.gap.paired
        assert bad.gap.percent > 2 and abs(rescued.gap.percent) < 1
        assert rescued.run.steps[0] == 80

    def test_no_loss_of_the_good_run_jumps(self) -> None:
        losses = np.array(Run.read(RECORDS / "baseline").loss.losses)
        assert (losses[1:] / losses[:-1]).max() < 1.5


# Long tests rest on scripts/demo.py and recipes/nemo_gpt.py.
@pytest.mark.long
def test_the_demo_of_full_length_names_the_culprit_and_recovers(tmp_path: Path) -> None:
    done = finished(*DEMO, tmp_path / "runs", env=ENVIRONMENT)
    printed = " ".join(done.stdout.split())
    assert "stuck_scale: X of decoder.layers.0.mlp.linear_fc2 went wrong at or before step 120" in printed
    assert "learning_rate: The learning rate is wrong at step 81" in printed
    gap = re.search(r"rescued: .*? ended ([\d.]+)% (above|below) the baseline", printed)
    assert gap and float(gap[1]) < 1


def test_the_demo_ends_with_the_verdicts_and_where_to_see_them(job: Demo) -> None:
    printed, baseline = " ".join(job.printed.split()), job.output / "baseline"
    with_reference = ("--reference", job.output / "reference")
    for name, options in {"learning_rate": with_reference, "stuck_scale": ()}.items():
        assert f"{name}: {said('diagnose', job.output / name, '--baseline', baseline, *options)['verdict']}" in printed
    assert re.search(
        r"rescued: stuck_scale from step \d+ on, with X of decoder\.layers\.0\.mlp\.linear_fc2 in current", printed
    )
    assert "Port 6006 is taken, so this uses port 6007." in printed


def test_one_table_has_the_end_of_each_run(job: Demo) -> None:
    rows = re.findall(r"^(\w+) +([\d.]+) +(?:[^\w ][\d.]+%)?   [a-z]", job.printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["baseline", "learning_rate", "reference", "stuck_scale", "rescued"]
    gap = diagnose(job.output / "stuck_scale", job.output / "baseline").loss.gap
    for name, shown in rows:
        losses = Run.read(job.output / name).loss
        assert gap and float(shown) == pytest.approx(np.mean(losses.losses[losses.steps >= gap.first]), abs=0.006)


def test_progress_has_a_loss_for_each_run_and_fits_a_terminal(job: Demo) -> None:
    lines = job.printed.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:3] == ["time", "left", "step"])
    assert lines[header].split()[3:] == ["baseline", "learning_rate", "reference", "stuck_scale"]
    rows = [line for line in lines[header + 1 :] if re.match(r" +\d+ s ", line)]
    assert rows and max(map(len, rows)) <= 80
    _, *losses = rows[0].rsplit(maxsplit=4)
    assert all(float(loss) > 1 for loss in losses)


# Long tests rest on scripts/demo.py.
@pytest.mark.long
def test_ctrl_c_ends_the_runs(tmp_path: Path) -> None:
    with subprocess.Popen(
        list(map(str, (*DEMO, tmp_path / "runs"))), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as demo:
        try:
            assert demo.stdout
            wait_until(lambda: len(psutil.Process(demo.pid).children()) == 4)
            runs = psutil.Process(demo.pid).children()
            demo.send_signal(signal.SIGINT)
            assert demo.wait(GUARD) == 130
            assert not [run for run in runs if run.is_running()]
        finally:
            end_all(demo)


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


def test_the_printed_address_opens_on_the_verdict(page: Page, job: Demo) -> None:
    told = story(diagnose(*(job.output / name for name in ("stuck_scale", "baseline"))))["headline"]
    headline = tab(page).locator(".headline[data-stage=all]")
    headline.wait_for()
    shown = " ".join(headline.inner_text().split())
    assert told["title"] in shown and told["cause_told"] in shown
    expect(tab(page).get_by_role("tab", name="Verdict")).to_have_attribute("aria-selected", "true")
    state = parse_qs(urlsplit(page.url).fragment)
    assert [state[f"p.fp8.{name}"] for name in ("run", "baseline")] == [["stuck_scale"], ["baseline"]]


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
        page.goto(f"{address}#p.fp8.run=learning_rate&p.fp8.baseline=baseline&p.fp8.reference=reference")
        headline = page.locator(".headline[data-stage=all]")
        headline.wait_for()
        shown = " ".join(headline.inner_text().split())
    assert "not FP8" in shown and "The learning rate is wrong at step 81" in shown
    assert re.search(r"The loss departed from the baseline.s around step \d+", shown)
    assert re.search(r"First tensor, a consequence:?\s*(X|dY) of decoder\.layers\.", shown)

"""The list of public bugs is complete, scoring is right on answers that are known, and its runs train."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bug_reports import judging, monitor_rule
from bug_reports.judging import RIGHT, UNSURE, WRONG, Said
from bug_reports.report import DRAWN, Answer, list_reports
from bug_reports.runs import MEASURED

from nemo_fp8_debug.analysis.diagnosis.finding import CAUSES

REPORTS = list_reports()
HANDED = [report for report in REPORTS.values() if not report.new]
NEW = [report for report in REPORTS.values() if report.new]
LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/((issues|pull)/\d+|blob/[0-9a-f]{40}/[\w./-]+)")
#: where a report of the last twelve months begins
RECENT = "2025-12"


@pytest.mark.parametrize("name", REPORTS)
def test_every_entry_is_complete(name: str) -> None:
    report = REPORTS[name]
    assert report.links and all(LINK.fullmatch(link) for link in report.links)
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", report.date)
    assert report.what.endswith(".") and report.mechanism and report.harm in ("harmful", "none")
    answer = report.answer
    assert answer.text.endswith(".") and answer.causes and set(answer.causes) <= set(CAUSES) - {"unknown"}
    assert all(len(pattern.split(" ", 1)) == 2 for pattern in answer.tensors)
    assert not answer.needs_tensor or answer.tensors or answer.causes == ("none",)
    assert answer.steps is None or answer.steps[0] <= answer.steps[1] < report.training.steps + 1
    assert (report.training.__doc__ or "").endswith(".")


def test_the_list_is_as_long_and_as_new_as_it_should_be() -> None:
    assert sum(not report.variant for report in HANDED) == 33
    assert len(NEW) >= 20
    assert sum(report.date >= RECENT for report in NEW) >= 8
    assert len({report.mechanism for report in REPORTS.values()}) == len(REPORTS)
    assert len({report.link for report in NEW}) == len(NEW)
    assert not {report.link for report in NEW} & {report.link for report in HANDED}
    assert sum(report.drawn for report in REPORTS.values()) == DRAWN
    assert all(report.new for report in REPORTS.values() if report.drawn)


def test_what_was_measured_is_what_the_list_says() -> None:
    measured = json.loads(MEASURED.read_text())
    assert set(measured) == set(REPORTS)
    assert {name: row["harm"] for name, row in measured.items()} == {name: r.harm for name, r in REPORTS.items()}
    assert sum(measured[report.name]["monitor"] == "silent" for report in NEW) >= 5


FAULT = Answer("W is wrong.", ("clipping",), ("layers.*.fc1 W",), steps=(40, 45))
NOTHING = Answer("Nothing is wrong.", ("none",), steps=None)
SAID = Said("layers.1.fc1 W", "clipping", 40, True, "harmful", "")
UNKNOWN = Said(None, "unknown", None, False, "unknown", "")


@pytest.mark.parametrize(
    ("answer", "said", "scores"),
    [
        (FAULT, SAID, (RIGHT, RIGHT, RIGHT)),
        (FAULT, replace(SAID, tensor="layers.1.fc2 W", step=50), (WRONG, RIGHT, WRONG)),
        (FAULT, replace(SAID, tensor=None, cause="software", step=None), (UNSURE, WRONG, UNSURE)),
        (replace(FAULT, needs_tensor=False), replace(SAID, tensor=None), (RIGHT, RIGHT, RIGHT)),
        (FAULT, UNKNOWN, (UNSURE, UNSURE, UNSURE)),
        (replace(FAULT, cannot_tell="nothing shows it"), UNKNOWN, (RIGHT, RIGHT, RIGHT)),
        (FAULT, replace(UNKNOWN, cause="none"), (UNSURE, UNSURE, UNSURE)),
        (FAULT, replace(UNKNOWN, cause="none", sure=True), (UNSURE, WRONG, UNSURE)),
        (NOTHING, replace(UNKNOWN, cause="none", sure=True), (RIGHT, RIGHT, "-")),
        (NOTHING, UNKNOWN, (RIGHT, RIGHT, "-")),
        (NOTHING, SAID, (WRONG, WRONG, "-")),
    ],
)
def test_scores(answer: Answer, said: Said, scores: tuple[str, str, str]) -> None:
    assert tuple(judging.score(answer, said).values()) == scores


def test_the_monitor_of_norms_and_nan() -> None:
    steps, losses, norms = list(range(60)), [2.0] * 60, [1.0] * 60
    assert monitor_rule.find_alarm(steps, losses, norms) == "silent" == monitor_rule.find_alarm(steps, losses, None)

    def put(values: list[float], value: float, *places: int) -> list[float]:
        return [value if i in places else kept for i, kept in enumerate(values)]

    assert monitor_rule.find_alarm(steps, put(losses, float("nan"), 3), norms) == "NaN loss at 3"
    assert monitor_rule.find_alarm(steps, losses, put(norms, float("inf"), 3)) == "NaN gradient norm at 3"
    assert monitor_rule.find_alarm(steps, losses, put(norms, 0.0, 4)) == "gradient norm 0 at 4"
    assert monitor_rule.find_alarm(steps, losses, put(norms, 20.0, 30)) == "gradient norm up at 30"
    assert monitor_rule.find_alarm(steps, losses, put(norms, 0.05, 30)) == "gradient norm down at 30"
    assert monitor_rule.find_alarm(steps, put(losses, 4.0, 30, 31), norms) == "silent"
    assert monitor_rule.find_alarm(steps, put(losses, 4.0, 30, 31, 32), norms) == "loss up at 30"


@pytest.mark.parametrize(("name", "alarm"), [("fused_loss_zero", "gradient norm 0 at 0"), ("moments_lost", "silent")])
def test_a_report_trains(tmp_path: Path, name: str, alarm: str) -> None:
    """A fault from the start changes the losses, and one after a resume begins there."""
    report = REPORTS[name]
    bad, good = (report.training(faulty).run(tmp_path / str(faulty), 6) for faulty in (True, False))
    assert len(bad) == len(good) == 6 and bad[0] == good[0] and bad != good
    assert (bad[:4] == good[:4]) == (name == "moments_lost")
    assert monitor_rule.watch_run(tmp_path / "True") == alarm


def test_what_diagnose_prints_is_read(tmp_path: Path) -> None:
    REPORTS["moments_lost"].training(True).run(tmp_path, 12)
    said = judging.ask(tmp_path, None)
    assert said.cause in CAUSES and all(said.texts) and said.texts and not said.tensor

"""Verdicts and recipes tried in a child process: right, alone, and gone when nobody wants them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from processes import wait_until
from samples import sample
from tab import FC1, FC2, Tab, start, write_counted_run

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.ranking import rank_tensors_by_harm
from nemo_fp8_debug.analysis.replay.replay import replay
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import serialize_comparison
from nemo_fp8_debug.errors import capture_warnings
from nemo_fp8_debug.tensorboard_plugin.jobs import analyses, job_queue


def write_run(folder: Path, harmed: bool) -> Path:
    """A run of 40 samples; harmed, one operand leaves in the middle and the loss after it."""
    record = start(folder)
    for i in range(40):
        lost = harmed and i > 20
        bad = (
            {"underflow_pct": 60.0, "mse": 1.0, "relative_error": 0.5, "amax": 4000.0, "outlier_log2": 16.0} if lost else {}
        )
        rows = [{"layer": FC1, "scale_source": "engine"} | bad, {"layer": FC2, "scale_source": "engine"}]
        record.record(sample(10 * i, rows))
        record.record_steps({10 * i + j: {"loss": 2.0 + 0.001 * j + (3.0 if harmed and i > 25 else 0)} for j in range(10)})
    record.close()
    return folder


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logdir")
    write_run(folder / "baseline", harmed=False)
    write_run(folder / "bad", harmed=True)
    write_counted_run(folder / "counted")
    return folder


@pytest.fixture
def tab(logdir: Path) -> Tab:
    return Tab(logdir)


def test_what_is_known_so_far_is_told_part_by_part(logdir: Path) -> None:
    told: list[Mapping[str, Any]] = []
    request = {"kind": "verdict", "run": str(logdir / "bad"), "baseline": str(logdir / "baseline"), "reference": None}
    answer = job_queue.answer_request(request | {"by": "step"}, told.append)
    assert [partial["stage"] for partial in told] == ["loss", "comparison", "diagnosis"]
    loss, compared, diagnosed = (partial["story"]["headline"] for partial in told)
    done = answer["result"]["story"]["headline"]
    assert done["title"].endswith(loss["title"]) and (loss["since"], loss["gap"]) == (done["since"], done["gap"])
    assert (compared["tensors"], compared["out_of_band"], compared["first_out"]) == (2, 1, 210)
    assert {name: value for name, value in diagnosed.items() if name != "change"} == {
        name: value for name, value in done.items() if name != "change"
    }
    so_far, whole = told[-1]["diagnosis"], answer["result"]["diagnosis"]
    assert {name for name in whole if so_far[name] != whole[name]} == {"fix", "next", "verdict"}
    assert whole["next"][0] == done["change"] and so_far["next"] == [] and diagnosed["change"] is None


def test_what_a_child_knows_so_far_is_answered_while_it_works(logdir: Path) -> None:
    mine, seen = job_queue.JobQueue(), []
    what = {"kind": "verdict", "run": str(logdir / "bad"), "baseline": str(logdir / "baseline"), "reference": None}

    def is_done() -> bool:
        answer = mine.get_or_start_job(what | {"by": "step"}, "1")
        seen.append(answer)
        return bool(answer["state"] != "working")

    wait_until(is_done)
    stages = [answer["partial"] and answer["partial"]["stage"] for answer in seen[:-1]]
    known = [stage for stage in stages if stage is not None]
    assert seen[-1]["state"] == "done" and "diagnosis" in known  # torch takes longer to import than it takes to ask
    order = ["loss", "comparison", "diagnosis"]
    assert known == sorted(known, key=order.index)
    mine.stop_all_jobs()


def waited(tab: Tab, route: str, **parameters: Any) -> Any:
    answers: list[Any] = []
    wait_until(lambda: answers.append(tab.json(route, **parameters)) or answers[-1]["state"] != "working")
    assert all(answer["seconds"] >= 0 for answer in answers[:-1])
    return answers[-1]


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_a_verdict_is_that_of_the_commands(tab: Tab, logdir: Path) -> None:
    answer = waited(tab, "verdict", run="bad", baseline="baseline")
    found = diagnose(logdir / "bad", logdir / "baseline")
    assert answer["state"] == "done", answer
    assert answer["result"]["diagnosis"] == plain(found.to_json())
    comparison, ranks = answer["result"]["comparison"], rank_tensors_by_harm(found)
    assert found.comparison and comparison | {"tensors": None} == plain(serialize_comparison(found.comparison)) | {
        "tensors": None
    }
    rows = [
        row | {"harm_rank": ranks[row["layer"], row["role"]]} for row in serialize_comparison(found.comparison)["tensors"]
    ]
    assert comparison["tensors"] == plain(sorted(rows, key=lambda row: row["harm_rank"]))
    assert answer["result"]["story"] == plain(story(found))
    assert answer["result"]["recommendation"]["plan"] == plain(found.recommend().to_json())["plan"]
    assert answer["result"]["story"]["headline"]["change"].startswith(f"Leave X of {FC1} in BF16 (")
    assert answer["result"]["diagnosis"]["culprit"]["layer"] == FC1
    plan = json.loads(answer["result"]["snippets"][0]["text"])
    assert [change["layer"] for change in plan["changes"]] == [FC1]
    assert tab.json("verdict", run="bad", baseline="baseline") == answer  # it was kept, or it would be worked on again


def test_a_recipe_is_what_if_as_by_replay(tab: Tab, logdir: Path) -> None:
    answer = waited(tab, "what_if", run="counted", step=12, recipe="current-e5m2")
    expected = replay(logdir / "counted", "current-e5m2", steps=[10])
    assert answer["state"] == "done" and answer["result"]["step"] == 10
    rows = answer["result"]["rows"]
    assert set(rows["recipe"]) == {"current-e5m2"} and set(rows["in_use"]) == {False}
    names = ["layer", "role", "relative_error", "underflow_pct", "overflow_pct", "mse", "rounded"]
    assert pl.DataFrame(rows).select(names).rows() == expected.select(names).rows()
    assert dict(zip(rows["role"], rows["rounded"], strict=True)) == {"input": False, "weight": True}


def test_what_cannot_be_answered_is_explained(logdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what the child would say."""

    def answered(**request: Any) -> str:
        answer = job_queue.answer_request(dict(request))
        assert answer["state"] == "failed"
        return str(answer["error"])

    run = str(logdir / "baseline")
    assert "unknown recipe" in answered(kind="what_if", run=run, step=0, recipe="nonsense")
    assert "no histograms" in answered(kind="what_if", run=run, step=0, recipe="current")
    assert "do not contain blocks" in answered(kind="what_if", run=run, step=0, recipe="mxfp8")
    assert "samples" in answered(kind="verdict", run=run, baseline=None, reference=None, by="samples")
    monkeypatch.setattr(analyses, "_MOST_REPLAYED", 79)
    assert "has 80 rows" in answered(kind="what_if", run=run, step=0, recipe="current")


@pytest.fixture
def asked(logdir: Path) -> Iterator[tuple[job_queue.JobQueue, Callable[[], dict[str, Any]]]]:
    mine = job_queue.JobQueue()
    what = {"kind": "what_if", "run": str(logdir / "counted"), "step": 0, "recipe": "current"}
    yield mine, lambda: mine.get_or_start_job(what, "1")
    mine.stop_all_jobs()


def the_child(mine: job_queue.JobQueue) -> subprocess.Popen[bytes]:
    wait_until(lambda: mine._child)
    assert mine._child
    return mine._child


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_child_that_is_killed_is_an_error(asked: Any) -> None:
    mine, ask = asked
    assert ask()["state"] == "working"
    os.kill(the_child(mine).pid, signal.SIGKILL)
    wait_until(lambda: ask()["state"] != "working")
    assert ask()["state"] == "failed" and "out of memory" in ask()["error"]


def test_a_job_that_nobody_asks_about_is_stopped(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ask = asked
    monkeypatch.setattr(job_queue, "_ABANDONED", 0.5)
    assert ask()["state"] == "working"
    pid = the_child(mine).pid
    wait_until(lambda: gone(pid))
    wait_until(lambda: not mine._is_working)


def test_one_child_at_a_time(asked: Any, logdir: Path) -> None:
    mine, ask = asked
    ask()
    first = the_child(mine)
    assert mine.get_or_start_job({"kind": "what_if", "run": "other"}, "1")["state"] == "working"
    time.sleep(0.3)
    assert mine._child is first
    answers = [mine.get_or_start_job({"kind": "what_if", "run": str(i)}, "1") for i in range(30)]
    assert answers[0]["state"] == "working" and "try again" in answers[-1]["error"]


def test_jobs_that_nobody_asks_about_any_more_make_room(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ask = asked
    ask()
    the_child(mine)
    monkeypatch.setattr(job_queue, "_UNASKED", 0.0)
    assert all(mine.get_or_start_job({"kind": "what_if", "run": str(i)}, "1")["state"] == "working" for i in range(50))
    assert len(mine._jobs) <= 17 and ask()["state"] == "working"


def test_a_job_that_takes_too_long_is_stopped_however_often_it_is_asked_about(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ask = asked
    monkeypatch.setattr(job_queue, "_LONGEST", 0.0)
    wait_until(lambda: ask()["state"] != "working")
    assert ask()["error"] == "The job was stopped because it took more than 0 minutes."


def test_a_job_that_takes_too_much_memory_ends_and_others_go_on(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ask = asked
    monkeypatch.setenv(job_queue.MEMORY, "0.01")
    assert ask()["state"] == "working"
    pid = the_child(mine).pid
    wait_until(lambda: ask()["state"] != "working")
    assert "used more than 0.01 GiB of memory" in ask()["error"] and job_queue.MEMORY in ask()["error"]
    assert gone(pid)
    monkeypatch.delenv(job_queue.MEMORY)
    monkeypatch.setattr(job_queue, "_STALE", 0.0)
    wait_until(lambda: ask()["state"] == "done")


def test_the_memory_of_a_process_is_what_it_fills() -> None:
    filled = "import sys; held = bytearray(b'x') * (1 << 28); print(flush=True); sys.stdin.read()"
    found = []
    for code in (filled, filled.replace("1 << 28", "1")):
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()
            found.append(job_queue.measure_memory(child.pid))
            child.communicate()
    # Pages that processes share count in part, so what another one does moves both.
    assert abs(found[0] - found[1] - (1 << 28)) < 1 << 24
    assert job_queue.measure_memory(child.pid) == 0


@pytest.mark.parametrize(
    ("given", "gib"), [("2", 2.0), ("0.5", 0.5), ("", None), ("0", None), ("nan", None), ("much", None)]
)
def test_the_memory_budget_of_jobs(monkeypatch: pytest.MonkeyPatch, given: str, gib: float | None) -> None:
    monkeypatch.setenv(job_queue.MEMORY, given)
    with capture_warnings() as heard:
        found = job_queue.read_memory_limit()
    machine = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert found == gib * (1 << 30) if gib else 0 < found <= machine / 2 + (1 << 20)
    assert [job_queue.MEMORY in text for text in heard] == ([True] if given and not gib else [])


def test_a_child_ends_with_tensorboard(logdir: Path) -> None:
    code = (
        "import sys, time; from nemo_fp8_debug.tensorboard_plugin.jobs.job_queue import JobQueue\n"
        "question = {'kind': 'verdict', 'run': sys.argv[1], 'baseline': None, 'reference': None, 'by': 'step'}\n"
        "jobs = JobQueue(); jobs.get_or_start_job(question, '')\n"
        "while jobs._child is None: time.sleep(0.01)\n"
        "print(jobs._child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(logdir / "bad")], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        time.sleep(1)
        parent.kill()
        wait_until(lambda: gone(pid))

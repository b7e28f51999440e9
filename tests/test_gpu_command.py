"""scripts/validation/gpu/run.sh on a CPU: its JSON, going on with one, limits, what is missing, the page's tables."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from gpu import tables
from gpu.part import add
from gpu.parts import PARTS
from gpu.processes import marked, run_limited
from gpu.results import Refused, Results, read
from gpu_command import LIMIT, run_command, start_command

ROOT = Path(__file__).parents[1]
ABOUT = {"emulated": False, "device": {"name": "A"}, "sources": "1", "versions": {"torch": "2"}, "machine": {}}
DONE = {"status": "done", "title": "t", "date": "2026-01-01T00:00:00", "commit": None, "results": {"measures": []}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of one part, over emulated kernels; it was ended at its limit first."""
    path = tmp_path_factory.mktemp("results") / "found.json"
    arguments = "--emulate", "--results", path, "--part", "counts"
    ended = run_command(*arguments, "--limit", "0.01")
    assert ended.returncode == 1 and "not finished: counts" in ended.stdout
    assert f"{path}: 0 of 1 parts finished" in ended.stdout.splitlines()
    done = run_command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{path}: 1 of 1 parts finished" in done.stdout.splitlines()
    return path


def test_the_kernel_counts_what_a_cpu_does_and_the_json_says_so(found: Path) -> None:
    data = json.loads(found.read_text())
    assert data["emulated"] is True and data["device"] is None
    assert data["versions"]["torch"] and data["machine"]["cores"] and len(data["sources"]) == 16
    *earlier, attempt = data["parts"]["counts"]
    assert [of["status"] for of in earlier] == ["timed out"], "what was noted before is kept"
    assert attempt["status"] == "done" and 0 < attempt["seconds"] < attempt["limit"] < 540
    lines = attempt["results"]["lines"]
    assert len(lines) == 7 and all(line["equal"] for line in lines)
    ran, same = attempt["results"]["measures"]
    assert "simulator" in ran["value"] and ran["kept"] is None and same["kept"] is True


def test_a_second_call_skips_what_is_finished(found: Path) -> None:
    before = found.read_bytes()
    done = run_command("--emulate", "--results", found, "--part", "counts")
    assert done.returncode == 0 and "[1/1] counts: finished in an earlier call" in done.stdout
    assert found.read_bytes() == before


def test_it_goes_on_with_a_file_that_it_leaves_as_it_is(found: Path, tmp_path: Path) -> None:
    before, new = found.read_bytes(), tmp_path / "new.json"
    done = run_command("--emulate", "--resume", found, "--results", new, "--part", "counts", "train-mxfp8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.read_bytes() == before
    parts = json.loads(new.read_text())["parts"]
    assert parts["counts"] == json.loads(before)["parts"]["counts"]
    assert [attempt["status"] for attempt in parts["train-mxfp8"]] == ["not emulated"]


def test_no_part_starts_that_could_take_longer_than_what_is_left(tmp_path: Path) -> None:
    done = run_command("--emulate", "--results", tmp_path / "found.json", "--part", "counts", "--minutes", "0.1")
    assert done.returncode == 1 and "not started: it could take 240 s" in done.stdout
    assert not (tmp_path / "found.json").exists()


def test_a_limit_ends_processes_in_other_sessions_too(tmp_path: Path) -> None:
    script = f"setsid sh -c 'echo $$ > {tmp_path}/child; sleep 1000' & sleep 1000"
    limit = 1.0
    while not (tmp_path / "child").exists():  # however long a shell takes to start
        ended = run_limited(["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, limit)
        assert ended.status is None and ended.seconds >= limit
        limit *= 2
    assert not runs((tmp_path / "child").read_text().strip())


def runs(process: str) -> bool:
    """Whether it has not ended, even if nobody has asked for its status yet."""
    try:
        status = (Path("/proc") / process / "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_command_that_is_ended_ends_its_part(tmp_path: Path) -> None:
    mark = tmp_path.name
    process = start_command("--emulate", "--results", tmp_path / "found.json", "--part", "counts", OF_TEST=mark)
    try:
        assert process.stdout and any("[1/1] counts" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert marked(mark, "OF_TEST") == []


def test_an_interpreter_that_has_nothing(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = tmp_path / "bare/bin/python"
    without = run_command("--results", tmp_path / "found.json", python=bare)
    assert without.returncode == 2 and "no CUDA device" in without.stderr and "--emulate" in without.stderr
    assert len(without.stderr.splitlines()) == 1 and not (tmp_path / "found.json").exists()
    emulated = run_command("--emulate", "--results", tmp_path / "found.json", python=bare)
    assert emulated.returncode == 1 and "Traceback" not in emulated.stderr
    listed = [line for line in emulated.stdout.splitlines() if line.startswith("missing: ")]
    assert {line.split()[1] for line in listed} >= {"torch", "numba", "transformer_engine", "megatron.core", "polars"}
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts.keys() == {part.name for part in PARTS}
    assert {attempt["status"] for (attempt,) in parts.values()} == {"missing", "not emulated"}
    assert "torch (is not there)" in parts["counts"][0]["reason"]


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    done = run_command("--emulate", "--python", tmp_path / "none", "--results", tmp_path / "found.json")
    assert done.returncode == 2 and "cannot be run" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"emulated": True, "device": None}, "emulation (True, here False)"),
        ({"device": {"name": "B"}}, "device (name B, here A)"),
        ({"sources": "2"}, "sources (2, here 1)"),
        ({"versions": {"torch": "1"}}, "versions (torch 1, here 2)"),
    ],
)
def test_parts_of_something_else_are_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    path = tmp_path / "found.json"
    Results.open(path, None, {**ABOUT, **other}).add("counts", DONE)
    before = path.read_bytes()
    with pytest.raises(Refused, match="name another --results") as told:
        Results.open(path, None, ABOUT)
    assert says in str(told.value) and "\n" not in str(told.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 0, "parts": {}}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(Refused, match=r"found\.json"):
        Results.open(tmp_path / "found.json", None, ABOUT)
    assert (tmp_path / "found.json").read_text() == text


def test_a_file_that_exists_is_not_replaced_by_one_that_is_resumed(tmp_path: Path) -> None:
    for name in ("old", "new"):
        Results.open(tmp_path / name, None, ABOUT).add("counts", DONE)
    with pytest.raises(Refused, match="exists already"):
        Results.open(tmp_path / "new", tmp_path / "old", ABOUT)


def test_the_tables_of_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    shutil.copy(tables.PAGE, page)
    tables.rewrite(page)
    assert page.read_text() == tables.PAGE.read_text(), "run scripts/validation/gpu/run.sh --tables"


def test_the_page_says_whether_it_was_run_on_a_gpu(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    shutil.copy(tables.PAGE, page)
    data = read(ROOT / "scripts/validation/gpu/results/emulated.json")
    assert data["emulated"]
    shown = tables.tables_of(data)
    assert "no time here means anything" in shown and "| emulated |" in shown
    device = {"name": "NVIDIA Z9", "capability": "9.9", "driver": None}
    (tmp_path / "z9.json").write_text(json.dumps({**data, "emulated": False, "device": device}))
    tables.rewrite(page, tmp_path)
    text = page.read_text()
    assert "Run on NVIDIA Z9" in text and "None of this was run on a GPU" not in text and "| emulated |" not in text
    (tmp_path / "z9.json").unlink()
    shutil.copy(ROOT / "scripts/validation/gpu/results/emulated.json", tmp_path)
    tables.rewrite(page, tmp_path)
    assert "**None of this was run on a GPU yet.**" in page.read_text()


def test_pieces_of_a_part_are_put_together() -> None:
    results: dict[str, Any] = {"measures": []}
    for piece in ({"lines": [1]}, {"measures": [2], "verdict": "a"}, {"lines": [3, 4]}):
        add(results, piece)
    assert results == {"measures": [2], "lines": [1, 3, 4], "verdict": "a"}


def test_every_part_has_less_than_nine_minutes() -> None:
    assert all(part.limit < 540 for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_the_command_needs_nothing_but_python() -> None:
    done = run_command("--list", python=sys.executable)
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == [part.name for part in PARTS]

"""scripts/setup.sh as a newcomer calls it: what it says when something is missing, and that it goes on where it ended."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import GUARD
from small_tree import clean_environment, copy_tree, run_setup, small_lists

NO_NETWORK = ("unshare", "-rn")


def _can_unshare(flags: str) -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0
    )


def _files(tree: Path) -> set[Path]:
    return {path.relative_to(tree) for path in tree.rglob("*")}


def _says_in_one_line(tree: Path, text: str, *before: str, **environment: str) -> None:
    """Setup ends with one line that has `text`, and has written nothing."""
    files = _files(tree)
    done = run_setup(tree, *before, **environment)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(f"setup: .*{text}.*\n", done.stderr), done.stderr
    assert not done.stdout
    assert _files(tree) == files


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without packages: nothing is to be installed."""
    folder = tmp_path_factory.mktemp("nothing")
    tree = copy_tree(folder)
    small_lists(tree, folder / "wheels")
    return tree


@pytest.fixture(params=["pretended", "real"])
def old_python(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "real":
        found = [p for p in (Path.home() / ".pyenv" / "versions").glob("3.9.*/bin/python3.9") if p.exists()]
        if not found:
            pytest.skip("no Python 3.9 under ~/.pyenv")
        return found[0]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; esac\necho Python 3.9\n')
    python.chmod(0o755)
    return python


def test_a_wrong_python_is_named(tree: Path, old_python: Path) -> None:
    _says_in_one_line(
        tree, f"Python 3.10 to 3.13 is needed, and {old_python} is Python 3.9. Name one: PYTHON=", PYTHON=str(old_python)
    )


def test_a_python_that_is_none_is_named(tree: Path) -> None:
    _says_in_one_line(tree, "no-such-python is not a Python", PYTHON="no-such-python")


def test_an_index_that_does_not_answer_is_named_without_its_password(tree: Path) -> None:
    index = "http://user:secret@127.0.0.1:9/simple"
    _says_in_one_line(tree, r"http://127.0.0.1:9/simple cannot be reached \(.*refused", PIP_INDEX_URL=index)


@pytest.mark.skipif(not _can_unshare("-rn"), reason="no namespaces here")
def test_no_network_is_named(tree: Path) -> None:
    _says_in_one_line(tree, "the network is needed, and https://pypi.org/simple cannot be reached", *NO_NETWORK)


@pytest.mark.skipif(not _can_unshare("-rm"), reason="no namespaces here")
def test_a_full_disk_is_named(tree: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    setup = f'mount -t tmpfs -o size=64m none {disk} && cp -r {tree}/. {disk} && cd {disk} && "$0"; find {disk}/.venv >&2'
    done = run_setup(tree, "unshare", "-rm", "sh", "-c", setup, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tree.parent / "wheels"))
    first, second = done.stderr.splitlines()
    assert re.fullmatch(rf"setup: 2\.\d GB of free disk is needed, and {disk} has 0\.\d GB\.", first)
    assert "No such file" in second


# Long tests rest on scripts/setup/*.py.
# Long tests rest on scripts/setup.sh.
@pytest.mark.long
@pytest.mark.skipif(not _can_unshare("-rn"), reason="no namespaces here")
def test_a_killed_setup_goes_on_where_it_ended_and_a_complete_one_needs_no_network(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    small_lists(tree, tmp_path / "wheels")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "UV_CACHE_DIR": str(tmp_path / "cache")}
    environment = clean_environment(**offline, SLOW_FOLDER=str(tmp_path))
    first = subprocess.Popen(
        ["scripts/setup.sh"], cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        _wait_for(tmp_path / "begun", first)
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=GUARD)
    marks = tree / ".venv" / "pieces"
    finished = {name: (marks / name).stat().st_mtime_ns for name in ("venv", "uv", "torch")}
    assert not (marks / "demo-packages").exists()

    (tmp_path / "go").touch()
    second = run_setup(tree, **offline, SLOW_FOLDER=str(tmp_path))
    assert second.returncode == 0, second.stdout + second.stderr
    assert {name: (marks / name).stat().st_mtime_ns for name in finished} == finished
    assert "Installing demo packages, nemo_fp8_debug" in second.stdout
    where = "import slow, sys, torch, importlib.util as u; print(u.find_spec('nemo_fp8_debug').origin, *sys.path, sep='\\n')"
    found = subprocess.run(
        [tree / ".venv/bin/python", "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    origin, *searched = found.stdout.splitlines()
    assert origin == str(tree / "nemo_fp8_debug" / "__init__.py"), found.stderr
    assert searched[-1] == str(tree / "scripts"), "behind all that is installed"

    files = _files(tree)
    third = run_setup(tree, *NO_NETWORK)
    assert (third.returncode, third.stdout, third.stderr) == (0, "", "")
    assert _files(tree) == files

    (marks / "venv").write_text("of another interpreter")
    fourth = run_setup(tree, **offline, SLOW_FOLDER=str(tmp_path))
    assert fourth.returncode == 0, fourth.stdout + fourth.stderr
    assert "Installing venv, uv, torch, demo packages, nemo_fp8_debug into" in fourth.stdout


def _wait_for(event: Path, process: subprocess.Popen[bytes]) -> None:
    while not event.exists():
        assert process.poll() is None, process.communicate()[0].decode()
        time.sleep(0.02)

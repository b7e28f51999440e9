"""A real TensorBoard process, which finds the tab by its entry point."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from processes import GUARD
from tab import FC1, unpacked, write_counted_run


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Where it is, and its process."""
    logdir = tmp_path_factory.mktemp("logdir")
    write_counted_run(logdir / "run/fp8_debug")
    options = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0", "--path_prefix", "/behind/a/proxy"]
    program = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", *options]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"at (http://127\.0\.0\.1:\d+/behind/a/proxy)", line):
                yield found[1], process.pid
                break
        else:
            pytest.fail("".join(said))
        process.kill()


def get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=GUARD) as response:
        content: bytes = response.read()
    return content


def test_the_tab_is_there(address: Any) -> None:
    base, _ = address
    tab = json.loads(get(f"{base}/data/plugins_listing"))["fp8"]
    assert tab["enabled"] and tab["tab_name"] == "FP8"
    assert b"export" in get(urljoin(base, tab["loading_mechanism"]["module_path"]))


def test_it_answers_without_torch_and_first_without_pandas(address: Any) -> None:
    base, pid = address
    routes = f"{base}/data/plugin/fp8"
    assert [run["name"] for run in json.loads(get(f"{routes}/runs"))["runs"]] == ["run"]
    ask(routes, "run", "loss")
    header, _ = unpacked(get(f"{routes}/frames?run=run&metric=mse&from=0&to=99"))
    assert header["steps"] == [0, 10, 20]
    assert get(f"{routes}/course?run=run&metric=mse&columns=9") and get(f"{routes}/spread?run=run&metric=mse")
    assert "/pandas/" not in libraries(pid)  # half a second to import
    ask(routes, "others&step=0", f"histogram&layer={FC1}&role=input&step=0")
    assert "libtorch" not in libraries(pid)


def ask(routes: str, *asked: str) -> None:
    for route in asked:
        name, _, more = route.partition("&")
        assert json.loads(get(f"{routes}/{name}?run=run&{more}"))


def libraries(pid: int) -> str:
    """Those that a process has loaded."""
    return Path(f"/proc/{pid}/maps").read_text()

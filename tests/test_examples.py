"""The public face: each name is documented, down to its parameters, and each example does what it says."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nemo_fp8_debug
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record import migration

RECORDS = Path(__file__).parent / "record" / "old" / "schema_3"
FOLDERS = {"baseline": "good", "bad": "bad", "reference": "twin"}
FIELDS = {field.name for field in dataclasses.fields(nemo_fp8_debug.Config)}
NAMES = [name for name in nemo_fp8_debug.__all__ if name not in ("__version__", "inspection")]


@pytest.fixture
def with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/baseline`, `runs/bad` and `runs/reference` in the current folder."""
    for name, recorded in FOLDERS.items():
        shutil.copytree(RECORDS / recorded, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)


def failures_of(thing: Any, name: str) -> int:
    public = {other: getattr(nemo_fp8_debug, other) for other in NAMES}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    examples = [test for test in finder.find(thing, name, globs={**public, name: thing}) if test.examples]
    assert examples, f"{name} has no example"
    return sum(runner.run(test).failed for test in examples)


@pytest.mark.usefixtures("with_runs", "megatron")
@pytest.mark.parametrize("name", NAMES)
def test_its_example_does_what_it_says(name: str) -> None:
    assert failures_of(getattr(nemo_fp8_debug, name), name) == 0


@pytest.mark.parametrize("name", ["folders_of", "with_earlier_names", "fingerprint"])
def test_examples_of_migration(name: str) -> None:
    assert failures_of(getattr(migration, name), name) == 0


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_is_documented(name: str) -> None:
    thing = getattr(nemo_fp8_debug, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    told = "\n".join(inspect.getdoc(part) or "" for part in (thing, getattr(thing, "__init__", None)) if part)
    options = FIELDS if "options: fields of `Config`" in told else set()
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name not in options:
            assert re.search(rf"^\s*{parameter.name}: ", told, re.MULTILINE), f"{parameter.name} of {name}"


def test_all_names_are_listed() -> None:
    assert {*nemo_fp8_debug.__all__} <= {*dir(nemo_fp8_debug)}
    assert sorted(nemo_fp8_debug.__all__) == nemo_fp8_debug.__all__


def test_the_command_tells_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"nemo-fp8-debug {nemo_fp8_debug.__version__}\n"

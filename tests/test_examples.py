"""The public face: each name is documented, down to its parameters. Each example of the package does what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nemo_fp8_debug
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.record import migration

REPOSITORY = Path(nemo_fp8_debug.__file__).parents[1]
RECORDS = Path(__file__).parent / "record" / "old" / "schema_3"
FOLDERS = {"baseline": "good", "bad": "bad", "reference": "twin"}
NAMES = [name for name in nemo_fp8_debug.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if name.islower()]
#: internal, and run in test_compaction.py and test_sql.py
ELSEWHERE = ("nemo_fp8_debug.record.merging.compact_record", "nemo_fp8_debug.record.views.sql_views")
SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")


@pytest.fixture
def with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/baseline`, `runs/bad` and `runs/reference` in the current folder."""
    for name, recorded in FOLDERS.items():
        shutil.copytree(RECORDS / recorded, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)


def public(name: str) -> Any:
    return getattr(nemo_fp8_debug, name)


def failures_of(thing: Any, name: str) -> int:
    """Of the examples of a function, or of a class and its methods."""
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    globs = {**{other: public(other) for other in NAMES}, name: thing}
    examples = [test for test in finder.find(thing, name, globs=globs) if test.examples]
    assert name in [test.name for test in examples], f"{name} has no example"
    return sum(runner.run(test).failed for test in examples)


@pytest.mark.usefixtures("with_runs", "megatron")
@pytest.mark.parametrize("name", NAMES)
def test_its_example_does_what_it_says(name: str) -> None:
    assert failures_of(public(name), name) == 0


def modules() -> Iterator[str]:
    """With an example."""
    for found in pkgutil.walk_packages(nemo_fp8_debug.__path__, "nemo_fp8_debug."):
        source = find_spec(found.name)
        told = Path(source.origin).read_text() if source and source.origin else ""
        if ">>> " in told:
            yield found.name


def is_run_elsewhere(example: str) -> bool:
    """Whether it is that of a public name, or needs a record that another test makes for it."""
    names = [f"{public(name).__module__}.{name}" for name in NAMES] + [*ELSEWHERE]
    return any(example == name or example.startswith(f"{name}.") for name in names)


@pytest.mark.usefixtures("with_runs")
@pytest.mark.parametrize("name", [*modules()])
def test_examples_of_what_is_internal(name: str) -> None:
    module, runner = importlib.import_module(name), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    globs = {other: public(other) for other in NAMES} | vars(module)
    for example in doctest.DocTestFinder().find(module, name, extraglobs=globs):
        assert is_run_elsewhere(example.name) or runner.run(example).failed == 0, example.name


@pytest.mark.parametrize(
    "name", ["list_table_folders", "add_earlier_column_names", "list_renamed_column_values", "migrate_fingerprint"]
)
def test_examples_of_migration(name: str) -> None:
    assert failures_of(getattr(migration, name), name) == 0


def arguments_told(doc: str) -> Mapping[str, str]:
    """What a docstring says of each argument, in one line."""
    section = re.search(r"^Args:\n((?: {4}.*\n|\n)*)", doc + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE) if section else ()
    return {name: " ".join(text.split()) for name, text in entries}


def docs_of(thing: Any) -> list[str]:
    """Of a function, or of a class and its constructor."""
    parts = [thing, vars(thing).get("__init__")] if inspect.isclass(thing) else [thing]
    return [inspect.getdoc(part) or "" for part in parts if part]


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that are ours and for users: not the events of a host, nor what is marked internal."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("nemo_fp8_debug")]
    of_hosts = {name for base in cls.__mro__ if base not in ours for name in vars(base)}
    for name, member in ((name, member) for base in ours for name, member in vars(base).items()):
        is_method = inspect.isfunction(member) or isinstance(member, (classmethod, property, cached_property))
        if name.startswith(("_", "on_")) or name in of_hosts or not is_method:
            continue
        if "Internal" not in (inspect.getdoc(getattr(cls, name) if isinstance(member, classmethod) else member) or ""):
            yield name, member.__get__(None, cls) if isinstance(member, classmethod) else member


def check_arguments(thing: Callable[..., Any], docs: list[str], name: str) -> None:
    told: dict[str, str] = {}
    for doc in docs:
        told |= arguments_told(doc)
    taken = {parameter for parameter in inspect.signature(thing).parameters if parameter != "self"}
    if "of `Config`" in told.get("options", ""):
        taken = taken - {*inspect.signature(nemo_fp8_debug.Config).parameters} | {"options", *({"output"} & {*told})}
    assert {*told} == taken, f"{name} documents {sorted(told)} and takes {sorted(taken)}"


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_is_documented_and_no_other(name: str) -> None:
    thing = public(name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    check_arguments(thing, docs_of(thing), name)
    for method, member in methods_of(thing) if inspect.isclass(thing) else ():
        assert inspect.getdoc(member), f"{name}.{method}"
        if callable(member):
            check_arguments(member, docs_of(member), f"{name}.{method}")


def test_a_parameter_without_documentation_is_found() -> None:
    def function(known: int, unknown: int) -> None:
        """Do nothing.

        Args:
            known: a number.
        """

    with pytest.raises(AssertionError, match=r"takes .*unknown"):
        check_arguments(function, docs_of(function), "function")


@pytest.mark.parametrize("name", NAMES)
def test_sections_are_in_order(name: str) -> None:
    docs = docs_of(public(name))
    for doc in docs:
        found = [line for line in doc.splitlines() if line in SECTIONS]
        assert found == sorted(found, key=SECTIONS.index)
    assert docs[0].splitlines()[0].endswith("."), "one line says what it is"
    needed = SECTIONS if name in FUNCTIONS else ("Example:",)
    assert {*needed} <= {*docs[0].splitlines()}


def test_each_option_has_its_default() -> None:
    told = arguments_told(docs_of(nemo_fp8_debug.Config)[0])
    for parameter in inspect.signature(nemo_fp8_debug.Config).parameters.values():
        found = re.search(r"Default: `(.*?)`", told[parameter.name])
        assert found and eval(found[1]) == parameter.default, parameter.name


def test_all_names_are_listed() -> None:
    assert dir(nemo_fp8_debug) == sorted(nemo_fp8_debug.__all__) == nemo_fp8_debug.__all__
    assert all(hasattr(nemo_fp8_debug, name) for name in nemo_fp8_debug.__all__)


def test_what_users_are_shown_imports_from_the_top() -> None:
    shown = [*(REPOSITORY / "recipes").glob("*.py"), *(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    assert [path.name for path in shown if re.search(r"(from|import) nemo_fp8_debug\.", path.read_text())] == []


def test_what_users_are_shown_calls_nothing_private() -> None:
    """A framework's private names come and go: DeepSpeed 0.18 has no `engine._get_optimizer_loss_scale`."""
    shown = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    shown += [path for path in (REPOSITORY / "recipes").glob("*.py") if path.name != "megatron_on_cpu.py"]
    private = re.compile(r"\b(?!self\b)\w+\._[a-z]\w*\(")
    assert [(path.name, private.findall(path.read_text())) for path in shown if private.search(path.read_text())] == []


def test_the_command_tells_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"nemo-fp8-debug {nemo_fp8_debug.__version__}\n"

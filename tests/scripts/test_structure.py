"""The figures of scripts/structure.py, on a tiny package whose figures are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import structure

FILES = {
    "__init__.py": '"""A package."""\n',
    "schema.py": 'SCHEMAS = {"metrics": {}, "states": {}}\n',
    "low.py": '''
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .high.top import Watcher


class Mode(TorchDispatchMode):
    """A docstring is no statement."""


class Finer(Mode):
    pass


def watch(watcher: "Watcher") -> object:
    return register_optimizer_step_pre_hook(watcher.see_step)
''',
    "high/__init__.py": "",
    "high/top.py": """
from .. import low
from ..schema import SCHEMAS


class Watcher:
    def attach(self, root):
        self.handle = root.register_forward_hook(print)
        return [path for path, _ in root.named_modules()] + list(root._modules.values()) + [low.watch(self), SCHEMAS]

    def detach(self):
        self.handle.remove()

    def see_step(self, parts, parse_recipe=None):
        return max(parts, key=lambda part: part.attempt).first_step, SCHEMAS["states"], parse_recipe("bf16")


def remove_first(values):
    values.remove(1)
""",
}
KNOWN = {
    "files": 5,
    "lines": 1 + 1 + 20 + 0 + 19,
    "statements": 1 + (5 + 1 + 0 + 2 + 2) + (2 + 1 + 3 + 2 + 2 + 2),
    "functions": 5,
    "single-word function names": 3,
    "single-word function names, %": 60.0,
    "hook registrations": 1,
    "files that register hooks": 1,
    "optimizer hooks": 1,
    "saved-tensor hooks": 0,
    "dispatch and function modes": 2,
    "observers that hold handles": 1,
    "walks over the model": 2,
    "files that walk": 1,
    "functions that choose rows": 1,
    "files that choose rows": 1,
    "files imported by one other": 3,
    "import circles of files": 1,
    "import circles of siblings": 1,
    "uses of parse_recipe": 1,
    "files that name metrics": 0,
    "files that name states": 1,
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tiny"


def test_each_figure_is_as_counted_by_hand(package: Path) -> None:
    found = {name: figure.value for name, figure in structure.measure(structure.read_folder(package)).items()}
    assert found == {**KNOWN, "lines a file": round(KNOWN["lines"] / 5, 1)}


def test_the_places_behind_a_figure(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    structure.main(["--package", str(package), "--list", "import circles of files"])
    assert capsys.readouterr().out.splitlines() == [
        "tiny/high/top.py:2: imports tiny/low.py",
        "tiny/low.py:8: imports tiny/high/top.py",
    ]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ('run.table("states")', True),
        ('read_rows(run, name="states")', True),
        ('TABLES["states"], tables[wanted or "states"]', True),
        ('known = "states" in tables', True),
        ('def read(run, table="states"): ...', True),
        ('class Observer:\n    name = "states"', True),
        ('LISTED = ("metrics", "states", "operands")', True),
        ('shown = {"states": 1, "verify_rows": 2}', True),
        ("step.config.states, monitor._config.states", True),
        ('replace(Config(), states=("update",))', True),
        ('saved = {"states": 1, "step": 2, "rng": 3}; saved.get("states")', False),
        ('LABELS = ("values", "states", "scale", "metrics", "weights")', False),
        ("states = {}; self.states = states; from .states import states", False),
        ('warn("no states were seen", kind="states")', False),
    ],
)
def test_what_names_a_table(text: str, counts: bool) -> None:
    tables = (
        'TABLES = (Table("metrics", {}), Table("states", {}))\n\nclass Config:\n    states = ()\n    verify_rows: int = 0\n'
    )
    files = structure.parse({"tiny/table.py": tables, "tiny/reader.py": text})
    found = structure.measure(files)["files that name states"]
    assert [place.file for place in found.places] == ["tiny/reader.py"] * counts

"""Every example of a docstring does what it says, those of what is internal too."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_fp8_debug

RECORDS = Path(__file__).parent / "record" / "old" / "schema_3"
PUBLIC = {name: getattr(nemo_fp8_debug, name) for name in nemo_fp8_debug.__all__}
#: whose examples have a record or a host made for them, in test_examples.py, test_compaction.py and test_sql.py
ELSEWHERE = {f"{thing.__module__}.{name}" for name, thing in PUBLIC.items() if hasattr(thing, "__module__")} | {
    "nemo_fp8_debug.record.compaction.compact",
    "nemo_fp8_debug.record.views.sql_views",
}


def modules() -> Iterator[str]:
    """With an example; but for what runs inside of Transformer Engine alone."""
    for found in pkgutil.walk_packages(nemo_fp8_debug.__path__, "nemo_fp8_debug."):
        source = importlib.util.find_spec(found.name)
        told = Path(source.origin).read_text() if source and source.origin else ""
        if ">>> " in told and ".inspection." not in found.name:
            yield found.name


@pytest.fixture
def with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recorded in {"baseline": "good", "bad": "bad"}.items():
        shutil.copytree(RECORDS / recorded, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("with_runs")
@pytest.mark.parametrize("name", [*modules()])
def test_examples_of(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(module, name, extraglobs=PUBLIC | vars(module)):
        if not test.name.startswith(tuple(ELSEWHERE)):
            assert runner.run(test).failed == 0, test.name

"""What importing the package brings along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_fp8_debug

ROOT = Path(nemo_fp8_debug.__file__).parent
FOLDERS = sorted({file.parent for file in ROOT.rglob("*.py")} - {ROOT})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_each_folder_is_a_package_and_marked_internal(folder: Path) -> None:
    summary = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").partition("\n")[0]
    assert summary.endswith(" Internal.")


def test_no_framework_is_imported_that_the_run_does_not_have() -> None:
    code = "import sys, nemo_fp8_debug; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "nemo", "nemo_run", "megatron", "transformer_engine", "deepspeed", "lightning"} & set(found.split())


def test_a_command_that_imports_torch_says_nothing_of_its_dependencies() -> None:
    code = "from nemo_fp8_debug.cli import app; app(['replay', '--help'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""

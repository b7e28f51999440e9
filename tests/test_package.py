"""What importing the package brings along."""

from __future__ import annotations

import subprocess
import sys


def test_no_framework_is_imported_that_the_run_does_not_have() -> None:
    code = "import sys, nemo_fp8_debug; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "nemo", "nemo_run", "megatron", "transformer_engine", "deepspeed", "lightning"} & set(found.split())


def test_a_command_that_imports_torch_says_nothing_of_its_dependencies() -> None:
    code = "from nemo_fp8_debug.cli import app; app(['replay', '--help'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""

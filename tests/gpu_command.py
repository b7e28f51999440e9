"""Runs scripts/validation/gpu/run.sh as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/validation/gpu/run.sh"
#: seconds: a guard
LIMIT = 1200


def start_command(*arguments: str | Path, python: str | Path = sys.executable, **environment: str) -> subprocess.Popen[str]:
    """With nothing on its path but what it puts there itself."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        env={**inherited, "PYTHON": str(python), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(*arguments: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    """To its end."""
    process = start_command(*arguments, python=python)
    try:
        told, errors = process.communicate(timeout=LIMIT)
    except BaseException:
        process.send_signal(signal.SIGTERM)  # it ends what it started
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, told, errors)

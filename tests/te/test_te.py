"""Real Transformer Engine with emulated kernels: runs the tests in `inside`, in a process that believes in a GPU.

Some of them alone:

    INSIDE_EMULATED_TE=1 PYTHONPATH=.venv/te:scripts/validation .venv/bin/python -m pytest tests/te/inside -k recompute
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TE = Path(sys.prefix) / "te"


def test_inside_emulated_te() -> None:
    assert (TE / "transformer_engine").is_dir(), f"no Transformer Engine in {TE}; scripts/setup.sh installs it"
    environment = os.environ | {
        "INSIDE_EMULATED_TE": "1",
        "PYTHONPATH": os.pathsep.join((str(TE), str(ROOT / "scripts/validation"))),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "inside")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.fail(done.stdout[-20_000:] + done.stderr[-2_000:], pytrace=False)

"""Real Transformer Engine with emulated kernels: runs the tests in `inside`, in a process that believes in a GPU.

Some of them alone:

    INSIDE_EMULATED_TE=1 PYTHONPATH=.venv/te:scripts/validation .venv/bin/python -m pytest tests/te/inside -k recompute
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import GUARD, finished, found_in

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TE = Path(sys.prefix) / "te"


def test_inside_emulated_te() -> None:
    assert (TE / "transformer_engine").is_dir(), f"no Transformer Engine in {TE}; scripts/setup.sh tests installs it"
    environment = os.environ | {
        "INSIDE_EMULATED_TE": "1",
        "PYTHONPATH": found_in(TE, ROOT / "scripts/validation"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "inside")]
    done = finished(*command, seconds=2 * GUARD, env=environment, cwd=ROOT)  # hundreds of tests
    if done.returncode != 0:
        pytest.fail(done.stdout[-20_000:] + done.stderr[-2_000:], pytrace=False)

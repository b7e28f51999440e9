"""Real Transformer Engine with emulated kernels: runs the tests in `inside`, in a process that believes in a GPU.

Some of them alone:

    INSIDE_EMULATED_TE=1 PYTHONPATH=.venv/te:scripts/validation .venv/bin/python -m pytest tests/te/inside -k recompute
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from long import long_but
from processes import GUARD, finished, found_in

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TE = Path(sys.prefix) / "te"
#: what takes longest
OTHERS = ("test_stored_weights", "test_verified")


# Long tests rest on tests/te/inside/*.py.
# Long tests rest on nemo_fp8_debug/capture/backends/transformer_engine/*.py.
# Long tests rest on nemo_fp8_debug/observations/*/*.py.
@pytest.mark.parametrize("which", long_but(("most",), ("most", "others")))
def test_inside_emulated_te(which: str) -> None:
    assert (TE / "transformer_engine").is_dir(), f"no Transformer Engine in {TE}; scripts/setup.sh tests installs it"
    environment = os.environ | {
        "INSIDE_EMULATED_TE": "1",
        "PYTHONPATH": found_in(TE, ROOT / "scripts/validation"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    others = [HERE / "inside" / f"{name}.py" for name in OTHERS]
    chosen = others if which == "others" else [HERE / "inside", *(f"--ignore={file}" for file in others)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, chosen)]
    done = finished(*command, seconds=2 * GUARD, env=environment, cwd=ROOT)  # hundreds of tests
    if done.returncode != 0:
        pytest.fail(done.stdout[-20_000:] + done.stderr[-2_000:], pytrace=False)

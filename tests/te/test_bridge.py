"""The callback under Megatron-Bridge's own `pretrain`, in a process that believes in a GPU; see compat/te_bridge.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import finished, found_in

ROOT = Path(__file__).parents[2]
BRIDGE, TE = Path(sys.prefix) / "bridge", Path(sys.prefix) / "te"


@pytest.mark.long
def test_the_recipe_trains_the_same_and_its_scales_are_the_kernels() -> None:
    assert (BRIDGE / "megatron").is_dir(), f"no Megatron-Bridge in {BRIDGE}; scripts/setup.sh tests installs it"
    environment = os.environ | {
        "PYTHONPATH": found_in(ROOT, BRIDGE, TE, ROOT / "recipes", ROOT / "scripts/validation"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts/validation/compat/te_bridge.py")]
    done = finished(*command, env=environment, cwd=ROOT)
    if done.returncode != 0:
        pytest.fail(done.stdout[-2_000:] + done.stderr[-8_000:], pytrace=False)

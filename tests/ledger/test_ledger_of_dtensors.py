"""The ledger of layers whose weights are DTensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ledger_models import close
from processes import finished


def test_a_rank_multiplies_its_part_of_tensor_parallelism_and_all_that_fsdp2_gathers() -> None:
    done = finished(sys.executable, "-W", "ignore", str(Path(__file__).with_name("dtensors.py")))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = 2 * 16 * 32
    parts = {"FSDP2": 1, "HSDP": 1, "FSDP2 by layer": 1, "tensor parallelism": 2, "both": 2}
    assert found == {layout: close([whole / n, 2 * whole / n]) for layout, n in parts.items()}

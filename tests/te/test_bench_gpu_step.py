"""The benchmark of steps on a GPU, over emulated kernels: every row is there, and what does not depend on time holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from processes import run_script

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OF_TIME = ("unsampled step", "sampled step", "average at interval 100")
KEPT = (
    "hooks in unsampled steps",
    "sketches that are the CPU's, count by count",
    "figures from sketches that are the CPU's, bit by bit",
    "figures from sums over float32 or blocks, likewise",
)
MEASURED = (
    *("the same in processor time of all threads", "hooks in a sampled step", "peak of device memory"),
    *(f"host time of a {kind}" for kind in ("forward pre-hook (X)", "forward hook (W)", "gradient hook (dY)")),
    "peak of host memory, sampled and unsampled",
)
#: GEMMs of the tiny model's layers, and their operands
OPERANDS = 2 * 4 * 3
#: of each of them: those that take no parameters, and those of delayed scaling
STATISTICS = {"LogTensorStats": 8, "LogFp8TensorStats": 5, "LogTensorStats + LogFp8TensorStats": 13}


def test_every_row_over_emulated_kernels() -> None:
    path = os.pathsep.join(map(str, (ROOT, Path(sys.prefix) / "te", HERE)))
    arguments = "--emulate", "--recipes", "delayed", "--pairs", "2", "--groups", "1"
    told = run_script(ROOT / "scripts/bench_gpu_step.py", *arguments, PYTHONPATH=path, TORCHDYNAMO_DISABLE="1")
    assert "does not run" not in told and "times say NOTHING" in told
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in told.splitlines() if line.startswith("|")]
    limits = {what: limit for what, _, limit, *others in rows if not others}
    assert [what for what in KEPT if not limits.pop(what).endswith(": kept")] == []
    assert [what for what in MEASURED if limits.pop(what) != ""] == []
    assert {"what", "---"} < limits.keys() and all(what.startswith(OF_TIME) for what in limits.keys() - {"what", "---"})
    assert sum(limit.endswith(("kept", "BROKEN")) for limit in limits.values()) == 4
    figures = {tool: int(count) for tool, *_, count, _ in (row for row in rows if len(row) == 5) if count.isdigit()}
    ours = figures.pop("nemo_fp8_debug")
    assert figures == {f"Transformer Engine {tool}": OPERANDS * each for tool, each in STATISTICS.items()}
    assert ours > max(figures.values())

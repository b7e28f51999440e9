"""What a look at the GEMMs of the small GPT costs, by this package, by other tools and by hand: a markdown table.

`scripts/benchmarks/peers/run.sh [--rounds 12] [--tools ours nvdlfw ...]` installs the tools and runs it, about 6 minutes.
Each tool has a process of its own with two equal models: in each round it looks at a step of the one, and three steps of the
other follow. What a look costs is how much longer its step and the one after it take than two of the last two, so that what
a tool leaves to the background counts where it slows the run. Processor time is that of all threads of the process, over the
whole round, so that nothing is hidden on another core. BF16, one thread for torch; medians, intervals 95% by bootstrap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.paired import Estimate, timed
from benchmarks.common.small_gpt import SmallGPT, one_process
from benchmarks.peers.tools import TOOLS

WARMUP = 3
#: whose statistics are computed by CUDA kernels; validation/gpu/run.sh runs them
ON_GPU = (
    ("Transformer Engine LogTensorStats", "min, max, mean, std, l1, l2, cur_amax, dynamic_range", "no"),
    ("Transformer Engine LogFp8TensorStats", "underflows%, overflows%, scale_inv_min, scale_inv_max, mse", "yes"),
)
COLUMNS = (
    "tool",
    "a sampled step, in plain steps",
    "in processor time",
    "cost, ours = 1",
    "cost in processor time",
    "metrics a step",
    "us a metric",
    "metrics of a tensor",
    "sees",
    "FP8",
)
Found = dict[str, Any] | str


def measure(tool: str, rounds: int) -> dict[str, Any]:
    """What each round of one tool costs in this process, in plain steps, and the seconds of a plain step."""
    with one_process(), tempfile.TemporaryDirectory() as folder:
        watched, plain = SmallGPT(), SmallGPT()
        step, figures = TOOLS[tool].watch(watched, Path(folder))
        found: dict[str, list[float]] = {"wall": [], "processor": [], "base": []}
        for number in range(WARMUP + rounds):
            used = time.process_time()
            own, after, *rest = (timed(call) for call in (step, plain.step, plain.step, plain.step))
            used = time.process_time() - used
            if number >= WARMUP:
                base, busy = (statistics.mean(times) for times in zip(*rest, strict=True))
                found["base"].append(base)
                found["wall"].append((own.wall + after.wall) / base - 2)
                found["processor"].append(used / busy - 4)
        return {**found, "metrics": figures()}


def measured(tool: str, rounds: int) -> Found:
    """The same in a process of its own, or the last thing that it said."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-W", "ignore", __file__, "--measure", tool, str(result), "--rounds", str(rounds)]
        with log.open("w") as said:
            code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, cwd=folder).returncode
        if code or not result.exists():
            print(log.read_text()[-3000:], file=sys.stderr)
            return log.read_text().strip().splitlines()[-1]
        return json.loads(result.read_text())


def row(tool: str, found: Found, ours: Found | None) -> list[str]:
    about = TOOLS[tool]
    computes = [about.computes, about.sees, about.fp8]
    if isinstance(found, str):
        return [about.name, f"does not run: {found}", *[""] * 5, *computes]
    cells = [about.name]
    for clock in ("wall", "processor"):
        cells.append(Estimate.of([1 + cost for cost in found[clock]]).show())
    for clock in ("wall", "processor"):
        known = isinstance(ours, dict) and tool != "none"
        cells.append(f"{statistics.median(found[clock]) / statistics.median(ours[clock]):.1f}" if known else "")
    metrics = found["metrics"]
    seconds = statistics.median(found["wall"]) * statistics.median(found["base"])
    return [*cells, f"{metrics:.0f}", f"{1e6 * seconds / metrics:.0f}" if metrics else "", *computes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--measure", nargs=2, metavar=("TOOL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        tool, result = options.measure
        Path(result).write_text(json.dumps(measure(tool, options.rounds)))
        return
    found = {tool: measured(tool, options.rounds) for tool in options.tools}
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    rows = [row(tool, of, found.get("ours")) for tool, of in found.items()]
    rows += [
        [name, "needs a GPU: validation/gpu/run.sh", *[""] * 5, computes, "X W dY", fp8] for name, computes, fp8 in ON_GPU
    ]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

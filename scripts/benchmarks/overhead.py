"""Measure what the monitor costs the small GPT on a CPU, and print the limits of our overhead contract next to it.

`OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmarks/overhead.py [--pairs 200] [--groups 24] [--blocks 3]` takes about 4
minutes.

Torch has one thread, and the model runs in BF16 without emulation, so that steps are short and a sample is relatively
expensive. Everything is recorded: the run record, TensorBoard and the printed table. Variants take turns within one process.
We print medians with 95% bootstrap intervals. For GPUs, use validation/gpu/run.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from text_windows import TextWindows
from torch.utils.data import DataLoader

from benchmarks.common.paired import timed
from benchmarks.common.small_gpt import MICRO_BATCH, SEQUENCE, SmallGPT, one_process
from benchmarks.common.step_costs import (
    BUSY,
    GROUP,
    INTERVAL,
    WARMUP,
    Row,
    hook_time,
    monitored,
    sampled,
    show,
    step,
    unsampled,
)


def whole_runs(blocks: int) -> list[Row]:
    """Compare blocks of 100 steps, each with one sample, with blocks without a monitor. The blocks take turns."""
    gpt, ratios = SmallGPT(), []
    for _ in range(blocks):
        with monitored(gpt, interval=INTERVAL, first_step=1) as monitor:
            for number in range(INTERVAL // 2 - WARMUP, INTERVAL // 2):
                step(gpt, monitor, number)
            mine = both_clocks(lambda i: step(gpt, monitor, INTERVAL // 2 + i))
        ratios.append([100 * (a / b - 1) for a, b in zip(mine, both_clocks(lambda i: gpt.step()), strict=True)])
    wall, processor = (" ".join(f"{more:+.1f}" for more in kind) for kind in zip(*ratios, strict=True))
    what = f"{wall} %; in processor time {processor} %"
    return [(f"blocks of {INTERVAL} steps against their neighbors", what, "as above, plus noise")]


def both_clocks(call: Callable[[int], object]) -> tuple[float, float]:
    """Return the wall time of a block of steps, and the CPU time of all threads, in seconds."""
    used = time.process_time()
    wall = timed(lambda: [call(i) for i in range(INTERVAL)]).wall
    return wall, time.process_time() - used


def memory() -> list[Row]:
    """Compare the peak memory of a new process with the monitor and a new process without it."""
    peaks = {}
    for kind in ("none", "monitor"):
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("overhead_memory.py")), kind]
        peaks[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    none, mine = peaks["none"], peaks["monitor"]
    before = mine["before"] - none["before"]
    return [
        ("peak memory", f"{mine['peak']:.0f} MiB with, {none['peak']:.0f} MiB without", ""),
        ("extra memory before the first step", f"{before:+.0f} MiB, mostly for imported modules", ""),
        ("further extra memory after it", f"{mine['peak'] - none['peak'] - before:+.0f} MiB", ""),
    ]


def data_loader(groups: int) -> list[Row]:
    """Measure how long a step waits for a batch from a loader process, just after a sample and elsewhere."""
    gpt = SmallGPT()
    windows = TextWindows((2 + groups) * GROUP * MICRO_BATCH, SEQUENCE)
    behind, elsewhere = [], []
    with monitored(gpt, interval=GROUP) as monitor:
        batches = iter(DataLoader(windows, MICRO_BATCH, num_workers=1))
        for number in range(len(windows) // MICRO_BATCH):
            waited = timed(lambda: next(batches)).wall
            step(gpt, monitor, number)
            if number >= 2 * GROUP:
                (behind if 0 < number % GROUP < BUSY else elsewhere).append(1e3 * waited)
    shown = [f"{statistics.median(found):.2f} ms, at most {max(found):.2f}" for found in (behind, elsewhere)]
    return [("wait for a batch, in the steps after a sample", shown[0], ""), ("elsewhere", shown[1], "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=3, help="number of pairs of blocks, or 0 for none")
    options = parser.parse_args()
    with one_process():
        print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}\n")
        parts = (
            lambda: unsampled(SmallGPT(), options.pairs).rows(),
            lambda: sampled(SmallGPT(), options.groups).rows(limit=1.5),
            lambda: whole_runs(options.blocks) if options.blocks else [],
            memory,
            lambda: data_loader(options.groups),
            lambda: hook_time(SmallGPT(), 10).rows(),
        )
        show(parts)


if __name__ == "__main__":
    main()

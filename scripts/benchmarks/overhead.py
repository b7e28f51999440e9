"""The overhead contract, measured: what the monitor costs the small GPT on a CPU, beside what it may cost.

`OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmarks/overhead.py [--pairs 200] [--groups 24] [--blocks 3]`, about 4
minutes. One thread for torch, BF16 and no emulation, so that a step is short and a sample tries most; everything is
recorded: the run record, TensorBoard and the printed table. What is compared takes turns within one process; metrics are
medians, intervals 95% by bootstrap. On a GPU: validation/gpu/run.sh.
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
    """Blocks of 100 steps with one sample each, in turn with blocks without a monitor."""
    gpt, ratios = SmallGPT(), []
    for _ in range(blocks):
        with monitored(gpt, interval=INTERVAL, first_step=1) as monitor:
            for number in range(INTERVAL // 2 - WARMUP, INTERVAL // 2):
                step(gpt, monitor, number)
            mine = both_clocks(lambda i: step(gpt, monitor, INTERVAL // 2 + i))
        ratios.append([100 * (a / b - 1) for a, b in zip(mine, both_clocks(lambda i: gpt.step()), strict=True)])
    wall, processor = (" ".join(f"{more:+.1f}" for more in kind) for kind in zip(*ratios, strict=True))
    what = f"{wall} %; in processor time {processor} %"
    return [(f"blocks of {INTERVAL} steps against their neighbors", what, "as above, with the noise")]


def both_clocks(call: Callable[[int], object]) -> tuple[float, float]:
    """Seconds of a block of steps, and processor time of all threads."""
    used = time.process_time()
    wall = timed(lambda: [call(i) for i in range(INTERVAL)]).wall
    return wall, time.process_time() - used


def memory() -> list[Row]:
    """Peak memory of processes of their own."""
    peaks = {}
    for kind in ("none", "monitor"):
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("overhead_memory.py")), kind]
        peaks[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    none, mine = peaks["none"], peaks["monitor"]
    before = mine["before"] - none["before"]
    return [
        ("peak memory", f"{mine['peak']:.0f} MiB with, {none['peak']:.0f} MiB without", ""),
        ("more than without, before the first step", f"{before:+.0f} MiB, most of it what is imported", ""),
        ("more than that after it", f"{mine['peak'] - none['peak'] - before:+.0f} MiB", ""),
    ]


def data_loader(groups: int) -> list[Row]:
    """How long a step waits for the batch that a process of its own loads, just behind a sample and elsewhere."""
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
    return [("wait for a batch, in the steps behind a sample", shown[0], ""), ("elsewhere", shown[1], "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=3, help="0: none")
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

"""The overhead contract, measured: what the monitor costs the small GPT on a CPU, beside what it may cost.

`OMP_NUM_THREADS=1 python scripts/bench_overhead.py [--pairs 200] [--groups 24] [--blocks 3]`, about 4 minutes. One thread
for torch, BF16 and no emulation, so that a step is short and a sample weighs most; everything is recorded: the run record,
TensorBoard and the printed table. What is compared takes turns within one process; figures are medians, intervals 95% by
bootstrap.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from paired import Estimate, timed
from small_gpt import MICRO_BATCH, SEQUENCE, SmallGPT, one_process
from text_windows import TextWindows
from torch.utils.data import DataLoader

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.hooks import Hook

INTERVAL = 100
NEVER = 10**9
WARMUP = 5
#: steps from one sample to the next where samples are timed, and those of them in which its background work may go on
GROUP, BUSY = 10, 5
Row = tuple[str, str, str]


@contextlib.contextmanager
def monitored(gpt: SmallGPT, **options: Any) -> Iterator[Monitor]:
    """The model with a monitor that records everything; what it prints is thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.closing(Monitor(gpt.model, folder, **options)) as monitor,
    ):
        yield monitor


def step(gpt: SmallGPT, monitor: Monitor, number: int) -> None:
    with monitor.step(number) as report:
        report(loss=gpt.step())


def hooks_on(gpt: SmallGPT) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in gpt.model.modules() for kind in kinds)
    on_tensors = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in gpt.model.parameters())
    everywhere = torch.nn.modules.module
    return on_modules + on_tensors + sum(len(getattr(everywhere, f"_global{kind}")) for kind in kinds)


def unsampled(pairs: int) -> list[Row]:
    """Steps without a monitor, with one that does not sample, and without again, in an order that goes round."""
    gpt = SmallGPT()
    before = hooks_on(gpt)
    with monitored(gpt, interval=NEVER) as monitor:
        step(gpt, monitor, 0)  # the only one that is sampled
        monitor.flush()
        counted, numbers = [], itertools.count(1)

        def attached() -> None:
            with monitor.step(next(numbers)) as report:
                counted.append(hooks_on(gpt))
                report(loss=gpt.step())

        for _ in range(WARMUP):
            attached()
        orders = itertools.cycle(itertools.permutations((gpt.step, attached, gpt.step)))
        ratios, control = [], []
        for order in itertools.islice(orders, pairs):
            times = [timed(call).wall for call in order]
            mine = times.pop(order.index(attached))
            ratios.append(mine / statistics.mean(times))
            control.append(times[0] / times[1])
    ratio = Estimate.of(ratios)
    noise = f"{pairs} pairs; none / none {Estimate.of(control).show(3)}"
    return [
        (
            "unsampled step, attached / none",
            f"{ratio.show(3)} ({noise})",
            f"1 within: {_kept(ratio.low <= 1 <= ratio.high)}",
        ),
        ("hooks in unsampled steps", str(max(counted) - before), f"0: {_kept(max(counted) == before)}"),
    ]


def sampled(groups: int) -> list[Row]:
    """Every tenth step is sampled; the later half of each ten is what a step takes without."""
    gpt = SmallGPT()
    with monitored(gpt, interval=GROUP) as monitor:
        for number in range(2 * GROUP):
            step(gpt, monitor, number)
        own, whole, processor = [], [], []
        for first in range(2 * GROUP, (2 + groups) * GROUP, GROUP):
            used = time.process_time()
            times = [timed(lambda i=i: step(gpt, monitor, i)) for i in range(first, first + GROUP)]
            used = time.process_time() - used
            base, busy = (statistics.median(kind) for kind in zip(*times[BUSY:], strict=True))
            own.append(times[0].wall / base)
            whole.append(1 + sum(taken.wall for taken in times[:BUSY]) / base - BUSY)
            processor.append(1 + used / busy - GROUP)
    until, cost = Estimate.of(own), Estimate.of(whole)
    average = Estimate(*(100 * (value - 1) / INTERVAL for value in (cost.median, cost.low, cost.high)))
    return [
        ("sampled step, until the next can start", f"{until.show()} unsampled steps", ""),
        ("sampled step, with all that it costs the next four", f"{cost.show()} unsampled steps", "at most 1.50"),
        ("the same in processor time of all threads", f"{Estimate.of(processor).show()} unsampled steps", ""),
        (f"average at interval {INTERVAL}", f"{average.show()} %", f"at most 0.50 %: {_kept(average.median <= 0.5)}"),
    ]


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
    return [(f"blocks of {INTERVAL} steps against their neighbours", what, "as above, with the noise")]


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


def hook_time(steps: int) -> list[Row]:
    """How long each hook of sampled steps holds the training thread up; on a CPU that is with counting."""
    gpt, times = SmallGPT(), defaultdict[str, list[float]](list)
    run, register = Hook.__call__, torch.Tensor.register_hook

    def of_kind(kind: str, call: Any) -> Any:
        def timing(*args: Any) -> Any:
            found: list[Any] = []
            times[kind].append(timed(lambda: found.append(call(*args))).wall)
            return found[0]

        return timing

    def of_module(hook: Hook, *args: Any) -> Any:
        return of_kind("forward pre-hook (X)" if len(args) == 3 else "forward hook (W)", run)(hook, *args)

    counted: list[int] = []
    with monitored(gpt, interval=1) as monitor:
        step(gpt, monitor, 0)
        Hook.__call__ = of_module
        torch.Tensor.register_hook = lambda x, hook: register(x, of_kind("gradient hook (dY)", hook))
        try:
            for number in range(1, 1 + steps):
                with monitor.step(number) as report:
                    counted.append(hooks_on(gpt))
                    report(loss=gpt.step())
                monitor.flush()  # no other thread of ours is under way
        finally:
            Hook.__call__, torch.Tensor.register_hook = run, register
    rows = [("hooks in a sampled step", f"{max(counted)}, and one on each output", "")]
    for kind, found in sorted(times.items()):
        calls, sums = len(found) / steps, 1e3 * sum(found) / steps
        what = f"{1e6 * statistics.median(found):.0f} us ({calls:.0f} calls, {sums:.1f} ms a step)"
        rows.append((f"host time of a {kind}", what, ""))
    return rows


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


def _kept(holds: bool) -> str:
    return "kept" if holds else "BROKEN"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=3, help="0: none")
    options = parser.parse_args()
    with one_process():
        print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}\n")
        print("| what | measured | limit |\n|---|---|---|")
        parts = (
            lambda: unsampled(options.pairs),
            lambda: sampled(options.groups),
            lambda: whole_runs(options.blocks) if options.blocks else [],
            memory,
            lambda: data_loader(options.groups),
            lambda: hook_time(10),
        )
        for part in parts:
            for row in part():
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

"""The overhead contract on a GPU: what the monitor costs a GPT of 1.1 billion parameters in real FP8, and what it may cost.

    python scripts/bench_gpu_step.py [--recipes delayed tensorwise blockwise]   # on a GPU
    scripts/bench_gpu_step.sh                                                   # on a CPU: a tiny model, emulated kernels

It needs torch, Transformer Engine 2.7 or later, megatron-core, nvdlfw_inspect and this package, and no network. It prints
for each recipe a table of the contract, which ends with whether figures are those that a CPU finds in the same tensors, and
one of Transformer Engine's own statistics of the same model. Steps are timed from an empty training stream to an empty one,
and nothing waits inside of them; what is compared takes turns. Everything is recorded. Medians, intervals 95% by bootstrap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import te_statistics
import torch
from dumped_figures import compare_with_cpu
from paired import Estimate, peak_memory
from step_costs import WARMUP, Row, hook_time, kept, monitored, sampled, show, step, unsampled
from te_model import GPT, RECIPES, SIZES, Setup, forget_models, megatron

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.numerics.catalogue import FIGURES
from nemo_fp8_debug.record.reader import read_table

LIMIT = 1.3
#: steps whose tensors are dumped and compared
RECORDED = 2
#: relative difference of float64 sums that are taken in another order
CLOSE = 1e-12
COLUMNS = ("tool", "a sampled step, in plain steps", "an unsampled step", "figures a step", "us a figure")


def memory(gpt: GPT, groups: int) -> list[Row]:
    """Peaks of steps, in turn sampled and not, until all that a step left is done."""
    device = torch.cuda.is_available()
    with monitored(gpt, interval=2) as monitor:
        peaks: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(2 + 2 * groups):
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if device:
                torch.cuda.reset_peak_memory_stats()
            step(gpt, monitor, number)
            monitor.flush()
            of_device = 0.0
            if device:
                torch.cuda.synchronize()
                of_device = torch.cuda.max_memory_allocated() / 2**20
            if number >= 2:
                peaks[number % 2 == 0].append((of_device, peak_memory()))
    medians = {of: [statistics.median(kind) for kind in zip(*found, strict=True)] for of, found in peaks.items()}

    def row(what: str, of: int) -> Row:
        on, off = medians[True][of], medians[False][of]
        return f"peak of {what} memory, sampled and unsampled", f"{on:.0f} and {off:.0f} MiB ({on - off:+.0f})", ""

    return [row("device", 0) if device else ("peak of device memory", "no device", ""), row("host", 1)]


@contextlib.contextmanager
def recorded(gpt: GPT) -> Iterator[Path]:
    """The record of some steps, with the operands of the first and the last layer dumped."""
    last = SIZES[gpt.setup.size][0] - 1
    options = {"interval": 1, "dump": [f"decoder.layers.{layer}.*" for layer in (0, last)], "dump_min_free_bytes": 0}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Monitor(gpt.model, folder, table_rows=0, **options)) as monitor:
            for number in range(RECORDED):
                step(gpt, monitor, number)
        yield Path(folder)


def exactness(run: Path) -> list[Row]:
    """Recorded operands, against what a CPU finds in the dumped tensors."""
    found = compare_with_cpu(run)
    counted, summed = found.counted, found.summed

    def all_of(what: str, equal: int, of: int) -> Row:
        return what, f"{equal} of {of}", f"all: {kept(0 < equal == of)}"

    rows = [all_of("sketches that are the CPU's, count by count", found.sketches, found.all)]
    if counted.figures:
        rows.append(all_of("figures from sketches that are the CPU's, bit by bit", counted.equal, counted.figures))
    if summed.figures:
        measured = f"{summed.equal} of {summed.figures}, the others within {summed.apart:.1e}"
        limit = f"at most {CLOSE}: {kept(summed.apart <= CLOSE)}"
        rows.append(("figures from sums over float32 or blocks, likewise", measured, limit))
    return rows


def figures_a_step(run: Path) -> float:
    rows = read_table(run, "figures")
    return sum(rows[name].count() for name in (*FIGURES, "nan", "inf")) / RECORDED


def beside(tool: str, sampled: Estimate, unsampled: Estimate, base: float, figures: float) -> list[str]:
    """A line of the second table; `base` is a plain step in seconds."""
    each = 1e6 * (sampled.median - 1) * base / figures
    return [tool, sampled.show(), unsampled.show(3), f"{figures:.0f}", f"{each:.0f}"]


def ours(setup: Setup, pairs: int, groups: int) -> list[str]:
    """Prints the contract; returns the line to hold Transformer Engine's against."""
    forget_models()
    gpt = GPT(setup)
    for _ in range(WARMUP):
        gpt.step()
    off, on = unsampled(gpt, pairs), sampled(gpt, groups)
    with recorded(gpt) as run:
        figures = figures_a_step(run)
        parts = (
            lambda: on.rows(LIMIT, LIMIT),
            lambda: hook_time(gpt, groups),
            lambda: memory(gpt, groups),
            lambda: exactness(run),
        )
        show((off.rows, *parts))
    return beside("nemo_fp8_debug", on.whole, off.ratio, on.base, figures)


def theirs(setup: Setup, tool: str, groups: int) -> list[str]:
    forget_models()
    found = te_statistics.cost(setup, tool, groups)
    name = f"Transformer Engine {' + '.join(te_statistics.TOOLS[tool])}"
    return beside(name, found.sampled, found.unsampled, found.base, found.figures)


def of_recipe(setup: Setup, options: argparse.Namespace) -> None:
    print(f"\n{setup.recipe}\n")
    lines = [ours(setup, options.pairs, options.groups)]
    print()
    for tool in te_statistics.TOOLS:
        try:
            lines.append(theirs(setup, tool, options.groups))
        except Exception as error:  # whatever another release of theirs raises
            lines.append([tool, does_not_run(error), "", "", ""])
    for line in (COLUMNS, ["---"] * len(COLUMNS), *lines):
        print("| " + " | ".join(line) + " |", flush=True)


def does_not_run(error: Exception) -> str:
    traceback.print_exception(error)
    return f"does not run: {type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--pairs", type=int, default=200, help="of steps that are not sampled")
    parser.add_argument(
        "--groups", type=int, default=10, help="of ten steps, one of them sampled; and steps whose hooks are timed"
    )
    parser.add_argument("--emulate", action="store_true", help="over emulated kernels, on a CPU")
    options = parser.parse_args()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1" if options.emulate else "0")
    with megatron(options.emulate) as device:
        size = "tiny" if options.emulate else "1b"
        where = "emulated kernels on a CPU, where times say NOTHING" if options.emulate else torch.cuda.get_device_name()
        print(f"megatron-core GPT ({size}), {where}, torch {torch.__version__}")
        for recipe in options.recipes:
            try:
                of_recipe(Setup(recipe, size, device), options)
            except Exception as error:  # blocks need a newer CUDA, and are not emulated
                print(does_not_run(error))


if __name__ == "__main__":
    main()

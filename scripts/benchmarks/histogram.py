"""Time the histogram of a BF16 tensor, compared with torch.aminmax of the same tensor, and metrics from many histograms.

`.venv/bin/python scripts/benchmarks/histogram.py [--threads 2] [--spread]` takes about 2 minutes.

We print the median time, and the median ratio to aminmax. Histogram and aminmax take turns, so that the machine's load
affects both. `hot` counts one tensor over and over, which a large cache can hold. `cold` cycles through 384 MiB of tensors,
as a training step cycles through its operands.

We also print ratios to aminmax of two lower bounds. `updates` is one counter update for each value, with all data in the
closest cache. `reading` is torch's sum of the same memory as integers. For views with gaps, `one row` replaces `reading`: it
counts as many values, but all from one row without gaps, which fits into the closest cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cpu.histogram import count_bit_patterns
from nemo_fp8_debug.kernels.cpu.histograms import Histograms
from nemo_fp8_debug.kernels.memory import view_bits
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.histogram import BINS

#: numbers of values, in units of 2^20
SIZES = (1, 4, 16, 64, 256)
#: bytes of all tensors in a cycle; the cache no longer holds a tensor when its turn comes again
COLD = 384 << 20
#: functions that turn a tensor [rows, 4096] or [rows, 8192] into the view to measure
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns of a wider one": lambda x: x[:, :4096],
    "every second column": lambda x: x[:, ::2],
}
#: number of calls in a row. The first call does not count, because torch's idle threads still spin during it
ROW = 6
#: seconds for each comparison; it has at least three turns
BUDGET = 2.0

Call = Callable[[torch.Tensor], object]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(tensors: list[torch.Tensor], calls: list[Call], budget: float = BUDGET) -> list[tuple[float, float]]:
    """Return each call's median time in ms, and the median ratio of its time to the last call's time in the same turn."""
    turns: list[list[float]] = []
    end, at = time.perf_counter() + budget, 0
    while len(turns) < 3 or time.perf_counter() < end:
        turn = []
        for call in calls:
            row = [tensors[(at + i) % len(tensors)] for i in range(ROW if tensors[0].numel() < 1 << 26 else 2)]
            at += len(row)
            turn.append(statistics.median([seconds(lambda x=x, call=call: call(x)) for x in row][1:]))
        turns.append(turn)
    return [
        (1e3 * statistics.median(column), statistics.median(t[i] / t[-1] for t in turns))
        for i, column in enumerate(zip(*turns, strict=True))
    ]


def values(n: int, spread: bool) -> torch.Tensor:
    """Return normal values. With `spread`, multiply them by 2^(2z), with z normal, so that they cover 20 binades."""
    x = torch.randn(n)
    return (x * torch.exp2(2 * torch.randn(n)) if spread else x).bfloat16()


def tensors_of(mebi: int, layout: str, spread: bool = False) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield one tensor as `hot`. Then yield so many tensors as `cold` that they do not stay in the cache."""
    columns = 4096 if layout in ("contiguous", "transposed") else 8192
    count, memory = max(1, COLD // (mebi << 21)), mebi * columns << 8
    room = values(1 << 24, spread).repeat(-(-count * memory >> 24))[: count * memory]
    made = [LAYOUTS[layout](part.view(-1, columns)) for part in room.split(memory)]
    yield "hot", made[:1]
    if count > 1:
        yield "cold", made


def reading(x: torch.Tensor) -> None:
    """Read a contiguous tensor, and sum its memory as 64-bit integers."""
    x.view(torch.int64).sum()


def one_row(x: torch.Tensor) -> None:
    """Count as many values as `x` has, but take all rows from a copy of the first row without gaps."""
    count_bit_patterns(view_bits(x[:1].contiguous().expand(x.shape)), np.zeros(BINS, np.int64), torch.get_num_threads())


def update_ns(threads: int, spread: bool = False) -> float:
    """Return the time to count a value without waiting for memory: one counter update, with all values in a close cache."""
    patterns = values(1 << 15, spread).view(torch.int16).numpy().view(np.uint16)
    counts = np.zeros(BINS, np.int64)
    best = min(seconds(lambda: [count_bit_patterns(patterns, counts, 1) for _ in range(32)]) for _ in range(80))
    return 1e9 * best / (32 * patterns.size) / threads


def metrics_of_500_histograms() -> float:
    """Return the seconds for all metrics of 500 histograms of normal values under 3 scalings."""
    scalings = ((1.0, E4M3), (100.0, E4M3), (1000.0, E5M2))

    def once() -> float:
        counted = [count_histogram((1 + i) * torch.randn(1 << 16).bfloat16()) for i in range(500)]
        start = time.perf_counter()
        histograms = Histograms(counted)
        for scale, fmt in scalings:
            scales = torch.full((500,), scale)
            metrics.compute_metrics(
                histograms.value_moments, histograms.quantization_sums(scales, [fmt] * 500), scales, scales
            )
        return time.perf_counter() - start

    return min(once(), once())  # the first call compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spread", action="store_true", help="values that spread over 20 binades")
    options = parser.parse_args()
    threads, spread = options.threads, options.spread
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    update = update_ns(threads, spread)
    print(
        f"BF16, {threads} threads; medians, and medians of ratios to torch.aminmax; an update is {threads * update:.2f} ns"
    )
    print(f"{'Mi':>4} {'layout':22} {'':4} {'histogram':>9} {'aminmax':>9}    ratio  updates  reading or one row")
    for layout in LAYOUTS:
        for mebi in SIZES:
            for name, tensors in tensors_of(mebi, layout, spread):
                floor = {"contiguous": [reading], "transposed": []}.get(layout, [one_row])
                found = in_turns(tensors, [count_histogram, *floor, torch.aminmax])
                (ours, ratio), (theirs, _) = found[0], found[-1]
                floors = f"{update * (mebi << 20) * 1e-6 / theirs:8.2f}" + "".join(f" {by:8.2f}" for _, by in found[1:-1])
                print(f"{mebi:4} {layout:22} {name:4} {ours:6.2f} ms {theirs:6.2f} ms {ratio:8.2f} {floors}", flush=True)
    print(f"metrics of 500 histograms under 3 scalings: {metrics_of_500_histograms():.2f} s")


if __name__ == "__main__":
    main()

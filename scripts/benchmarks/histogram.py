"""Times the histogram of a BF16 tensor beside torch.aminmax of the same tensor, and metrics from many histograms.

`.venv/bin/python scripts/benchmarks/histogram.py [--threads 2] [--spread]`, about 2 minutes. Ratios and medians; the two
take turns, so that they share the machine's moods. `hot` counts one tensor over and over, which a large cache serves; `cold`
goes round as many as 384 MiB hold, as a training step goes round its operands. Beside them two floors, ratios to aminmax as
well: `updates`, one counter update a value with everything in the closest cache, and `reading`, torch's sum of the same
memory as words. Of views with gaps instead `one row`: as many values of one row without gaps, which the closest cache holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cpu.histogram import count_patterns
from nemo_fp8_debug.kernels.cpu.histograms import Histograms
from nemo_fp8_debug.kernels.memory import view_bits
from nemo_fp8_debug.numerics import metrics
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.histogram import BINS

#: values, in 2^20
SIZES = (1, 4, 16, 64, 256)
#: what tensors are that are no longer served by the cache when their turn comes again
COLD = 384 << 20
#: what is done with [rows, 4096] or [rows, 8192] before it is measured
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns of a wider one": lambda x: x[:, :4096],
    "every second column": lambda x: x[:, ::2],
}
#: calls in a row, of which the first is not counted: torch's idle threads spin into it
ROW = 6
#: seconds a comparison takes, three turns at the least
BUDGET = 2.0

Call = Callable[[torch.Tensor], object]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(tensors: list[torch.Tensor], calls: list[Call], budget: float = BUDGET) -> list[tuple[float, float]]:
    """Median of each call in ms, and the median of its ratios to the last one in the same turn."""
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
    """Normal values; spread over 20 binades, times 2^(2z) with z normal."""
    x = torch.randn(n)
    return (x * torch.exp2(2 * torch.randn(n)) if spread else x).bfloat16()


def tensors_of(mebi: int, layout: str, spread: bool = False) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """One tensor of so many values, and as many as do not stay in the cache."""
    columns = 4096 if layout in ("contiguous", "transposed") else 8192
    count, memory = max(1, COLD // (mebi << 21)), mebi * columns << 8
    room = values(1 << 24, spread).repeat(-(-count * memory >> 24))[: count * memory]
    made = [LAYOUTS[layout](part.view(-1, columns)) for part in room.split(memory)]
    yield "hot", made[:1]
    if count > 1:
        yield "cold", made


def reading(x: torch.Tensor) -> None:
    """Reads a contiguous tensor and adds it up as words."""
    x.view(torch.int64).sum()


def one_row(x: torch.Tensor) -> None:
    """Counts as many values as `x` has, all rows of which are its first one, without gaps."""
    count_patterns(view_bits(x[:1].contiguous().expand(x.shape)), np.zeros(BINS, np.int64), torch.get_num_threads())


def update_ns(threads: int, spread: bool = False) -> float:
    """What counting a value costs when no memory is waited for: one counter update, of values that a close cache holds."""
    patterns = values(1 << 15, spread).view(torch.int16).numpy().view(np.uint16)
    counts = np.zeros(BINS, np.int64)
    best = min(seconds(lambda: [count_patterns(patterns, counts, 1) for _ in range(32)]) for _ in range(80))
    return 1e9 * best / (32 * patterns.size) / threads


def metrics_of_500_histograms() -> float:
    """Seconds for all metrics of 500 histograms of normal values under 3 scalings."""
    scalings = ((1.0, E4M3), (100.0, E4M3), (1000.0, E5M2))

    def once() -> float:
        counted = [count_histogram((1 + i) * torch.randn(1 << 16).bfloat16()) for i in range(500)]
        start = time.perf_counter()
        histograms = Histograms(counted)
        for scale, fmt in scalings:
            scales = torch.full((500,), scale)
            metrics.compute_metrics(histograms.moments, histograms.quantization_sums(scales, [fmt] * 500), scales, scales)
        return time.perf_counter() - start

    return min(once(), once())  # the first compiles


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

"""Times the sketch of a BF16 tensor beside torch.aminmax of the same tensor, and figures from many sketches.

`python scripts/bench_sketch.py [--threads 2]`. Ratios and medians; the two take turns, so that they share the machine's
moods. `hot` counts one tensor over and over, which a large cache serves; `cold` goes round twelve of them, as a
training step goes round its operands.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from nemo_fp8_debug.kernels import sketch
from nemo_fp8_debug.kernels.cpu import count_patterns
from nemo_fp8_debug.numerics import figures
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.sketch import BINS, SketchBatch

VALUES = 1 << 24
ROUNDS = 80
#: calls in a row; the two take turns by blocks
BLOCK = 8


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare_with_aminmax(tensors: list[torch.Tensor]) -> tuple[float, float, float]:
    """Medians of sketch and aminmax in ms, and the median ratio of neighbouring blocks."""

    def block(call: Callable[[torch.Tensor], object], first: int) -> list[float]:
        chosen = [tensors[(first + i) % len(tensors)] for i in range(BLOCK)]
        return [seconds(lambda x=x: call(x)) for x in chosen][1:]  # torch's idle threads spin into the first call

    ours, theirs, ratios = [], [], []
    for i in range(ROUNDS // BLOCK):
        a, b = block(sketch, 2 * i * BLOCK), block(torch.aminmax, (2 * i + 1) * BLOCK)
        ours, theirs = ours + a, theirs + b
        ratios.append(statistics.median(a) / statistics.median(b))
    return 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs), statistics.median(ratios)


def floor_ms(threads: int) -> float:
    """What counting costs when no memory is waited for: one counter update a value, of values that a close cache holds."""
    values = torch.randn(1 << 15).bfloat16().view(torch.int16).numpy().view(np.uint16)
    counts = np.zeros(BINS, np.int64)
    best = min(seconds(lambda: [count_patterns(values, counts, 1) for _ in range(32)]) for _ in range(ROUNDS))
    return 1e3 * best * VALUES / (32 * values.size) / threads


def figures_of_500_sketches() -> float:
    """Seconds for all figures of 500 sketches of normal values under 3 scalings."""
    sketches = [sketch((1 + i) * torch.randn(1 << 16).bfloat16()) for i in range(500)]
    start = time.perf_counter()
    batch = SketchBatch.of(sketches)
    moments = figures.moments(batch)
    for scale, fmt in ((1.0, E4M3), (100.0, E4M3), (1000.0, E5M2)):
        scales = torch.full((500,), scale)
        figures.figures(moments, figures.quantization_sums(batch, scales, [fmt] * 500), scales, scales)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    tensors = [torch.randn(VALUES).bfloat16() for _ in range(12)]
    sketch(tensors[0])
    print(f"{VALUES / 2**20:.0f} Mi BF16 values, {torch.get_num_threads()} threads, medians of {ROUNDS}")
    for name, chosen in (("hot", tensors[:1]), ("cold", tensors)):
        ours, theirs, ratio = compare_with_aminmax(chosen)
        print(f"{name:5} sketch {ours:6.2f} ms   torch.aminmax {theirs:6.2f} ms   ratio {ratio:.2f}")
    print(f"floor of one counter update a value: {floor_ms(torch.get_num_threads()):.2f} ms")
    print(f"figures of 500 sketches under 3 scalings: {figures_of_500_sketches():.2f} s")


if __name__ == "__main__":
    main()

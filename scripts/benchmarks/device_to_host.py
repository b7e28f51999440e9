"""Time the copy of a sampled step's histograms from a device, and the computation of moments and sums from them.

`.venv/bin/python scripts/benchmarks/device_to_host.py [--operands 240]`

In a run, both happen in the background thread. Without a CUDA device, the copy is within the host. Then only the number of
launched operations is meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8_debug.capture.device_to_host import copied_to_host
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cpu.histograms import Histograms
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.histogram import Histogram

ROUNDS = 10
#: number of values of an operand; the number of occupied bins grows slowly with it
VALUES = 1 << 20
#: operators that launch no kernel
VIEWS = ("view", "slice", "select", "unbind", "detach", "as_strided", "split", "lift_fresh", "empty", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """A mode that counts all operators except views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        self.counts[name] += name not in VIEWS
        return operator(*args, **(kwargs or {}))


def to_host(away: torch.Tensor) -> torch.Tensor:
    if away.device.type != "cuda":
        return away.clone()
    return torch.empty(away.shape, dtype=away.dtype, pin_memory=True).copy_(away)


def copy_to_host(histograms: Sequence[Histogram]) -> list[torch.Tensor]:
    return copied_to_host([of.counts for of in histograms], to_host)


def launches(histograms: Sequence[Histogram]) -> int:
    """Return the number of operations that the copy launches."""
    with Launches() as counted:
        copy_to_host(histograms)
    return counted.counts.total()


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of some work."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def find_sums(histograms: Sequence[Histogram], scales: int) -> None:
    """Compute moments, and sums under a number of scales."""
    found = Histograms([Histogram(of.dtype, of.counts) for of in histograms])
    _ = found.value_moments
    for i in range(scales):
        found.quantization_sums(torch.full((len(histograms),), 2.0**i), [E4M3] * len(histograms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operands", type=int, default=240)
    n = parser.parse_args().operands
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = [count_histogram((1 + i) * torch.randn(VALUES).bfloat16()) for i in range(n)]
    bins = sum(len(of.occupied_bins[0]) for of in host)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    away = [Histogram(of.dtype, of.counts.to(device)) for of in host]
    print(
        f"{n} operands, {bins:,} bins that are not empty, on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}"
    )
    print(f"copy to the host: {launches(away)} operations, {milliseconds(lambda: copy_to_host(away)):.1f} ms")
    for scales in (0, 1, 2, 4):
        took = milliseconds(lambda scales=scales: find_sums(host, scales))  # type: ignore[misc]
        print(f"moments, and sums under {scales} scales: {took:.1f} ms", flush=True)


if __name__ == "__main__":
    main()

"""What it takes to bring the histograms of a sampled step from a device, with what metrics ask of them found there first.

`.venv/bin/python scripts/benchmarks/device_to_host.py [--operands 240]`. On a CUDA device: milliseconds of the thread in the
background, bytes copied, and whether moments and sums are the host's bit by bit. Without one: the operations that are
launched, counted on a CPU, and what the host takes to compute the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8_debug.capture.packed_transfer import CastRequests, copied_to_host
from nemo_fp8_debug.kernels import histogram_of
from nemo_fp8_debug.kernels.cpu.precompute import precompute
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.histogram import Histogram
from nemo_fp8_debug.numerics.precomputed import Histograms

ROUNDS = 10
#: values of an operand; what it occupies of its histogram grows slowly with them
VALUES = 1 << 20
#: operators that launch nothing
VIEWS = ("view", "slice", "select", "unbind", "detach", "as_strided", "split", "lift_fresh", "empty", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """Counts operators but views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        self.counts[name] += name not in VIEWS
        return operator(*args, **(kwargs or {}))


def asked_of(histograms: Sequence[Histogram], scales: int) -> CastRequests:
    """The sums of each under so many scales."""
    return [(of, [(torch.tensor(2.0**i), E4M3) for i in range(scales)]) for of in histograms]


def to_host(away: torch.Tensor) -> torch.Tensor:
    if away.device.type != "cuda":
        return away.clone()
    return torch.empty(away.shape, dtype=away.dtype, pin_memory=True).copy_(away)


def milliseconds(histograms: Sequence[Histogram], scales: int) -> float:
    """Median time of the thread that brings them."""
    found, asked = [], asked_of(histograms, scales) if scales else ()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        copied_to_host([of.counts for of in histograms], to_host, asked)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def milliseconds_on_host(histograms: Sequence[Histogram], scales: int) -> float:
    """Median time in which the host finds the same in its own memory."""
    found = []
    for _ in range(ROUNDS):
        here = [Histogram(of.dtype, of.counts) for of in histograms]
        start = time.perf_counter()
        precompute(asked_of(here, scales))
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def same(away: Sequence[Histogram], host: Sequence[Histogram], scales: int) -> bool:
    """Whether what the device found is what the host computes, bit by bit."""
    copied_to_host([of.counts for of in away], to_host, asked_of(away, scales))
    theirs, ours = Histograms(away), Histograms(host)
    pairs = [(theirs.moments, ours.moments)]
    for i in range(scales):
        scale, formats = torch.full((len(host),), 2.0**i), [E4M3] * len(host)
        pairs.append((theirs.quantization_sums(scale, formats), ours.quantization_sums(scale, formats)))
    return all(torch.equal(column, getattr(b, name)) for a, b in pairs for name, column in vars(a).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operands", type=int, default=240)
    n = parser.parse_args().operands
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = [histogram_of((1 + i) * torch.randn(VALUES).bfloat16()) for i in range(n)]
    bins = sum(len(of.occupied[0]) for of in host)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{n} operands, {bins:,} bins that are not empty, on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}"
    )
    for scales in (0, 1, 2, 4):
        away = [Histogram(of.dtype, of.counts.to(device)) for of in host]
        with Launches() as launches:
            copied_to_host([of.counts for of in away], to_host, asked_of(away, scales) if scales else ())
        line = f"under {scales} scales: {launches.counts.total():5} operations"
        line += f"   host {milliseconds_on_host(host, scales):6.1f} ms"
        if device == "cuda":
            line += f"   device, with the copy {milliseconds(away, scales):6.1f} ms"
        print(line + f"   {'equal' if same(away, host, scales) else 'NOT EQUAL'} bit by bit", flush=True)


if __name__ == "__main__":
    main()

"""Times sketch, block sums and float32 figures of a tensor on a CUDA device against its own copy; else: what to expect.

`python scripts/bench_gpu.py [--mib 64 256 1024]`. On a device, a line a tensor: the rate of the kernel beside that of
`torch.clone`, which reads and writes each byte; whether it finds what the CPU does; the same by plain torch operations; and
what a call costs the thread that makes it. Without one, the traffic model of docs/gpu.md in figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nemo_fp8_debug.kernels import anywhere, count_into, moments, quantization_sums, sketch
from nemo_fp8_debug.numerics.blocks import BlockRule, quantization_sums_in_blocks
from nemo_fp8_debug.numerics.figures import QuantizationSums, moments_of_float32, quantization_sums_of_float32
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.scaling import parse_recipe
from nemo_fp8_debug.numerics.sketch import BINS, Sketch

ROUNDS = 30
WARP = 32


@dataclass(frozen=True)
class Device:
    """What is published of a device."""

    name: str
    bytes_per_second: float
    multiprocessors: int
    clock: float


DEVICES = [Device("H100 SXM", 3.35e12, 132, 1.98e9), Device("H200 SXM", 4.8e12, 132, 1.98e9)]
#: assumptions: the part of the published bandwidth that a copy, or a read, gets; clocks that a pass over the banks takes
REACHED, CLOCKS = 0.90, (1, 2)
#: instructions a value in the compiled loop (sm_90), and those that a multiprocessor issues in a clock, a thread each
INSTRUCTIONS, ISSUED = 11, 128
#: of block sums, a value: instructions, those in float64, conversions to it; how many of each a multiprocessor does a clock
BLOCK_COSTS = {"issue": (31.0, ISSUED), "float64": (5.4, 64), "conversions": (2.1, 16)}
#: of float32, a value: the same
FLOAT32_COSTS = {
    "moments": {"issue": (20.5, ISSUED), "float64": (3.0, 64), "conversions": (1.0, 16)},
    "sums": {"issue": (30.8, ISSUED), "float64": (7.0, 64), "conversions": (2.0, 16)},
}
#: instructions a value besides under each recipe of blocks: in NVFP4 some block of a warp overflows
RECIPES = {"blockwise": 0.0, "mxfp8": 0.0, "nvfp4": 3.5}


def normal(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.randn(n, device=device, dtype=torch.bfloat16)


def sparse(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return normal(n, device).relu()


def heavy_tailed(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return normal(n, device) * (3 * torch.randn(n, device=device)).exp().bfloat16()


def one_value(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.full((n,), 1.5, device=device, dtype=torch.bfloat16)


KINDS: list[Callable[..., torch.Tensor]] = [normal, sparse, heavy_tailed, one_value]


def passes(x: torch.Tensor) -> float:
    """Passes over the 32 banks that a warp's update needs on average: different counters of one bank take turns."""
    bits = x.view(torch.int16).numpy().view(np.uint16) & 0x7FFF
    # The lanes of a warp hold neighbouring words and update the values at one place of them at once.
    warps = bits[: len(bits) // 128 * 128].reshape(-1, WARP, 4).transpose(0, 2, 1).reshape(-1, WARP)
    ordered = np.sort(warps, axis=1)
    first = np.concatenate([np.ones((len(ordered), 1), bool), np.diff(ordered, axis=1) != 0], axis=1)
    banks = np.zeros((len(ordered), 32), np.int64)
    np.add.at(banks, (np.arange(len(ordered))[:, None], ordered % 32), first)
    return float(banks.max(1).mean())


def model() -> None:
    """What each bound allows, in parts of the rate of a copy."""
    print("No CUDA device. Expected of the sketch, by the model of docs/gpu.md, in TB/s read:")
    print(f"{'':9} {'values':13} {'passes':>6}  {'memory':>6}  {'issue':>6}  {'counters':>11}  {'against a copy':>14}")
    torch.manual_seed(0)
    for device in DEVICES:
        lanes = device.multiprocessors * device.clock
        memory, issue = REACHED * device.bytes_per_second, 2 * lanes * ISSUED / INSTRUCTIONS
        for kind in KINDS:
            turns = passes(kind(1 << 18))
            counters = [2 * lanes * WARP / (turns * clocks) for clocks in CLOCKS]
            best, worst = (min(memory, issue, rate) / memory for rate in counters)
            print(
                f"{device.name:9} {kind.__name__:13} {turns:6.2f}  {memory / 1e12:6.2f}  {issue / 1e12:6.2f}  "
                f"{counters[1] / 1e12:4.2f} - {counters[0] / 1e12:4.2f}  {worst:7.2f} - {best:4.2f}"
            )


def model_of_blocks() -> None:
    """The same of block sums."""
    print("Expected of block sums:")
    print(
        f"{'':9} {'recipe':9}  {'memory':>6}  "
        + "  ".join(f"{name:>11}" for name in BLOCK_COSTS)
        + f"  {'against a copy':>14}"
    )
    for device in DEVICES:
        lanes, memory = device.multiprocessors * device.clock, REACHED * device.bytes_per_second
        for recipe, more in RECIPES.items():
            costs = {name: cost + more * (name == "issue") for name, (cost, _) in BLOCK_COSTS.items()}
            bounds = [2 * lanes * rate / costs[name] for name, (_, rate) in BLOCK_COSTS.items()]
            print(
                f"{device.name:9} {recipe:9}  {memory / 1e12:6.2f}  "
                + "  ".join(f"{bound / 1e12:11.2f}" for bound in bounds)
                + f"  {min(memory, *bounds) / memory:14.2f}"
            )


def model_of_float32() -> None:
    """The same of the figures of float32 tensors, which are read once for their moments and once for their sums."""
    print("Expected of float32:")
    for device in DEVICES:
        lanes, memory = device.multiprocessors * device.clock, REACHED * device.bytes_per_second
        for name, costs in FLOAT32_COSTS.items():
            bounds = {bound: 4 * lanes * rate / cost for bound, (cost, rate) in costs.items()}
            told = "  ".join(f"{bound} {found / 1e12:5.2f}" for bound, found in bounds.items())
            against = min(memory, *bounds.values()) / memory
            print(f"{device.name:9} {name:9}  memory {memory / 1e12:5.2f}  {told}  against a copy {against:4.2f}")


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device, of memory that its cache does not hold."""
    call()
    swept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        swept.zero_()  # and the device is busy until all that is timed has been launched
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def host_microseconds(call: Callable[[], object]) -> float:
    """Median time of a call in the thread that makes it, which waits for nothing."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def measure(x: torch.Tensor, name: str) -> None:
    counted = Sketch(x.dtype, torch.zeros(BINS, dtype=torch.int64, device=x.device))
    size = x.numel() * x.element_size()
    ours, clone = milliseconds(lambda: count_into(counted, x)), milliseconds(x.clone)
    plain = milliseconds(lambda: anywhere.count_patterns(x.view(torch.int16), counted.counts))
    equal = torch.equal(sketch(x).counts.cpu(), sketch(x.cpu()).counts)
    rate, copied = size / ours / 1e9, 2 * size / clone / 1e9
    host = host_microseconds(lambda: count_into(counted, x))
    print(
        f"{name:13} {size >> 20:5} MiB  sketch {ours:7.3f} ms {rate:5.2f} TB/s   clone {clone:7.3f} ms {copied:5.2f} TB/s   "
        f"ratio {rate / copied:4.2f}   plain torch {plain:8.2f} ms   host {host:5.0f} us"
        f"   {'equal to' if equal else 'NOT EQUAL TO'} the CPU's",
        flush=True,
    )


def same(a: QuantizationSums, b: QuantizationSums) -> bool:
    """Counts equal, sums to 1e-12: they are added up in another order."""
    counts = torch.equal(a.underflows, b.underflows) and torch.equal(a.overflows, b.overflows)
    sums = ((a.sum_error2, b.sum_error2), (a.sum_xq, b.sum_xq), (a.sum_q2, b.sum_q2))
    return counts and all(torch.allclose(x, y, rtol=1e-12, atol=0) for x, y in sums)


def measure_blocks(x: torch.Tensor, recipe: str, role: str) -> None:
    rule, fmt = parse_recipe(recipe).scaling, parse_recipe(recipe).format_of(role)
    assert isinstance(rule, BlockRule)
    size = x.numel() * x.element_size()
    counted = sketch(x)
    ours, clone = milliseconds(lambda: quantization_sums(x, rule, role, fmt, counted)), milliseconds(x.clone)
    plain = milliseconds(lambda: quantization_sums_in_blocks(x, rule, role, fmt))
    part = x[:1024]
    equal = same(quantization_sums(part, rule, role, fmt).cpu(), quantization_sums(part.cpu(), rule, role, fmt))
    rate, copied = size / ours / 1e9, 2 * size / clone / 1e9
    host = host_microseconds(lambda: quantization_sums(x, rule, role, fmt, counted))
    print(
        f"{recipe:9} {role:11} {size >> 20:5} MiB  sums {ours:7.3f} ms {rate:5.2f} TB/s   clone {clone:7.3f} ms "
        f"{copied:5.2f} TB/s   ratio {rate / copied:4.2f}   plain torch {plain:8.2f} ms   host {host:5.0f} us"
        f"   {'equal to' if equal else 'NOT EQUAL TO'} the CPU's",
        flush=True,
    )


def measure_float32(x: torch.Tensor) -> None:
    """Moments and sums by themselves, as a hook asks for them."""
    scale, size = torch.full((), 3.7, device=x.device), x.numel() * x.element_size()
    part = x[: 1 << 20]
    ours, theirs = moments(part).cpu(), moments_of_float32(part.cpu())
    extremes = torch.equal(ours.amax, theirs.amax) and torch.equal(ours.amin, theirs.amin)
    totals = torch.allclose(ours.sum_x4, theirs.sum_x4, rtol=1e-12, atol=0)
    sums = same(
        quantization_sums(part, scale, "input", E4M3).cpu(), quantization_sums(part.cpu(), scale.cpu(), "input", E4M3)
    )
    calls: dict[str, tuple[bool, Callable[[], object], Callable[[], object]]] = {
        "moments": (extremes and totals, lambda: moments(x), lambda: moments_of_float32(x)),
        "sums": (
            sums,
            lambda: quantization_sums(x, scale, "input", E4M3),
            lambda: quantization_sums_of_float32(x, scale, E4M3),
        ),
    }
    clone = milliseconds(x.clone)
    copied = 2 * size / clone / 1e9
    for name, (equal, call, plain) in calls.items():
        took = milliseconds(call)
        rate = size / took / 1e9
        print(
            f"float32 {name:13} {size >> 20:5} MiB  {took:7.3f} ms {rate:5.2f} TB/s   clone {clone:7.3f} ms "
            f"{copied:5.2f} TB/s   ratio {rate / copied:4.2f}   plain torch {milliseconds(plain):8.2f} ms   "
            f"host {host_microseconds(call):5.0f} us   {'equal to' if equal else 'NOT EQUAL TO'} the CPU's",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    sizes = parser.parse_args().mib
    if not torch.cuda.is_available():
        model()
        model_of_blocks()
        model_of_float32()
        return
    print(f"{torch.cuda.get_device_name()}, medians of {ROUNDS}")
    for kind in KINDS:
        for mib in sizes if kind is normal else sizes[:1]:
            measure(kind(mib << 19, "cuda"), kind.__name__)
    measure(normal(sizes[0] << 19, "cuda")[1:-1], "not aligned")
    measure(normal(sizes[0] << 19, "cuda").half(), "float16")
    for recipe in RECIPES:
        for role in ("input", "weight"):
            for mib in sizes:
                measure_blocks(normal(mib << 19, "cuda").view(-1, 4096), recipe, role)
    for mib in sizes:
        measure_float32(normal(mib << 18, "cuda").float())


if __name__ == "__main__":
    main()

"""What kernels can reach at most, the traffic model of docs/kernels.md.

PYTHONPATH=.:scripts/validation python -m gpu.traffic_model
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .tensors import KINDS

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


def passes(x: torch.Tensor) -> float:
    """Passes over the 32 banks that a warp's update needs on average: different counters of one bank take turns."""
    bits = x.view(torch.int16).numpy().view(np.uint16) & 0x7FFF
    # The lanes of a warp hold neighboring words and update the values at one place of them at once.
    warps = bits[: len(bits) // 128 * 128].reshape(-1, WARP, 4).transpose(0, 2, 1).reshape(-1, WARP)
    ordered = np.sort(warps, axis=1)
    first = np.concatenate([np.ones((len(ordered), 1), bool), np.diff(ordered, axis=1) != 0], axis=1)
    banks = np.zeros((len(ordered), 32), np.int64)
    np.add.at(banks, (np.arange(len(ordered))[:, None], ordered % 32), first)
    return float(banks.max(1).mean())


def model() -> None:
    """What each bound allows, in parts of the rate of a copy."""
    print("Expected of the kernel that counts, in TB/s read:")
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
    """The same of the metrics of float32 tensors, which are read once for their moments and once for their sums."""
    print("Expected of float32:")
    for device in DEVICES:
        lanes, memory = device.multiprocessors * device.clock, REACHED * device.bytes_per_second
        for name, costs in FLOAT32_COSTS.items():
            bounds = {bound: 4 * lanes * rate / cost for bound, (cost, rate) in costs.items()}
            told = "  ".join(f"{bound} {found / 1e12:5.2f}" for bound, found in bounds.items())
            against = min(memory, *bounds.values()) / memory
            print(f"{device.name:9} {name:9}  memory {memory / 1e12:5.2f}  {told}  against a copy {against:4.2f}")


if __name__ == "__main__":
    model()
    model_of_blocks()
    model_of_float32()

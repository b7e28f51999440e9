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


def bound(device: Device, values: int, costs: dict[str, tuple[float, int]], more: float = 0.0) -> dict[str, float]:
    """TB/s that each bound allows.

    Args:
        values: bytes of a value.
        costs: of a value, and how many of each a multiprocessor does a clock.
        more: instructions besides.
    """
    lanes = device.multiprocessors * device.clock / 1e12
    rates = {name: values * lanes * each / (cost + more * (name == "issue")) for name, (cost, each) in costs.items()}
    return {"memory": REACHED * device.bytes_per_second / 1e12, **rates}


def tell(device: Device, what: str, bounds: dict[str, float]) -> None:
    """Print the bounds, and what part of a copy's rate the least one is."""
    told = "  ".join(f"{name} {rate:5.2f}" for name, rate in bounds.items())
    print(f"{device.name:9} {what:28} {told}  against a copy {min(bounds.values()) / bounds['memory']:4.2f}")


def main() -> None:
    """Tell what bounds each kernel, in TB/s read."""
    torch.manual_seed(0)
    for device in DEVICES:
        for kind in KINDS:
            turns = passes(kind(1 << 18))
            for clocks in CLOCKS:
                counters = 2 * device.multiprocessors * device.clock / 1e12 * WARP / (turns * clocks)
                bounds = bound(device, 2, {"issue": (INSTRUCTIONS, ISSUED)}) | {"counters": counters}
                tell(device, f"counts, {kind.__name__}, {turns:.2f} x {clocks}", bounds)
        for recipe, more in RECIPES.items():
            tell(device, f"blocks, {recipe}", bound(device, 2, BLOCK_COSTS, more))
        for name, costs in FLOAT32_COSTS.items():
            tell(device, f"float32 {name}", bound(device, 4, costs))


if __name__ == "__main__":
    main()

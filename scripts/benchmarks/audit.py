"""Measure time and peak memory of an audit, for each format and dtype of a checkpoint of 1 GiB.

`.venv/bin/python scripts/benchmarks/audit.py [--gib 1]`

Each audit runs in a new process. We compare its peak resident memory with the peak of an audit of a single small weight.
Weights are 4096 x 4096, which is 32 MiB in BF16 and 64 MiB in FP32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

SIDE = 4096
AUDIT = """
import re, sys, time
from nemo_fp8_debug.analysis.checkpoint.audit import audit
start = time.perf_counter()
found = audit(sys.argv[1])
seconds = time.perf_counter() - start
# Not getrusage, which reports the peak of the parent process if that was larger.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(len(found.rows), seconds, int(peak[1]) / 1024)
"""


def weights(gib: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    n = round(gib * 2**30 / (SIDE * SIDE * dtype.itemsize))
    return {f"layers.{i}.fc.weight": (0.02 * torch.randn(SIDE, SIDE)).to(dtype) for i in range(n)}


def checkpoints(gib: float, dtype: torch.dtype, folder: Path) -> Iterator[tuple[str, Path]]:
    """Save the same weights in each format, one after the other. Yield each format and path."""
    state = weights(gib, dtype)
    save_file(state, folder / "a.safetensors")
    yield "safetensors", folder / "a.safetensors"
    torch.save(state, folder / "a.pt")
    yield "torch.save", folder / "a.pt"
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    yield "DCP", folder / "dcp"


def measure(path: Path) -> tuple[int, float, float]:
    """Audit a checkpoint in a new process. Return the number of weights, seconds, and peak resident memory in MiB."""
    command = [sys.executable, "-W", "ignore", "-c", AUDIT, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(found[0]), float(found[1]), float(found[2])


def main(gib: float) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.safetensors"
        save_file({"fc.weight": torch.randn(8, 8)}, small)
        _, _, idle = measure(small)
        print(f"peak of an audit of one small weight: {idle:.0f} MiB")
        for dtype in (torch.bfloat16, torch.float32):
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                for name, path in checkpoints(gib, dtype, Path(inner)):
                    n, seconds, peak = measure(path)
                    kind = f"{name:12} {str(dtype).removeprefix('torch.'):9} {gib:g} GiB, {n} weights"
                    print(f"{kind}: {seconds:5.1f} s, peak {peak:.0f} MiB, {peak - idle:.0f} MiB above")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    main(parser.parse_args().gib)

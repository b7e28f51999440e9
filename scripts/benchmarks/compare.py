"""Measure the comparison of two large records on disk, by a process of the command line.

    .venv/bin/python scripts/benchmarks/compare.py [--tensors 1500] [--steps 1000] [--keep FOLDER]

The metrics of both runs are usual values with noise. In the bad run, one tensor of every tenth layer leaves its band. We
print wall-clock seconds, CPU seconds, and the peak memory of the process. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nemo_fp8_debug.core.keys import SHOWN_AS
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.writer import RunRecordWriter

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
USUAL = {"underflow_pct": 0.3, "overflow_pct": 0.001, "relative_error": 0.027, "mse": 1e-5, "amax": 4.0, "outlier_log2": 4.0}
#: steps between samples
INTERVAL = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="write the records to this folder, or use the records that are in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        for seed, name in enumerate(("baseline", "bad")):
            if not (folder / name).exists():
                write(folder / name, options.tensors, options.steps, seed, harmed=name == "bad")
        print(f"2 runs of {options.tensors} tensors x {options.steps} sampled steps")
        for arguments in ([], ["--json"]):
            measure(["compare", str(folder / "bad"), "--baseline", str(folder / "baseline"), *arguments])


def write(run: Path, tensors: int, steps: int, seed: int, harmed: bool) -> None:
    random = np.random.default_rng(seed)
    names = [f"decoder.layers.{i // 4}.{KINDS[i % 4]}" for i in range(-(-tensors // len(SHOWN_AS)))]
    keys = [(name, role) for name in names for role in SHOWN_AS][:tensors]
    off = np.array([name.endswith("0.mlp.linear_fc2") and role == "input" for name, role in keys])
    record = RunRecordWriter(run)
    record.open({"recipe": {"measured_against": "delayed-hybrid"}})
    for i in range(steps):
        grown = np.where(off & harmed & (i > steps / 2), 100.0, 1.0)
        record.record(Sample(INTERVAL * i, {"metrics": columns(keys, grown, random)}, {}))
        losses = 2 + 3 * np.exp(-i / steps * 5) + random.normal(0, 0.02, INTERVAL) + (harmed and i > 0.6 * steps)
        record.record_steps({INTERVAL * i + j: {"loss": loss} for j, loss in enumerate(losses)})
    record.close()


def possible(name: str, values: Any) -> Any:
    """Limit values to the largest value that the metric can have."""
    return np.minimum(values, {"cosine": 1.0, "underflow_pct": 100.0, "overflow_pct": 100.0}.get(name, np.inf))


def columns(keys: list[tuple[str, str]], grown: Any, random: np.random.Generator) -> dict[str, Any]:
    n = len(keys)
    constant = {"recipe": "delayed-hybrid", "format": "e4m3", "dtype": "bfloat16", "scale_source": "engine", "calls": 8}
    counts = {"n": 1 << 22, "nan": 0, "inf": 0}
    grows = ("underflow_pct", "mse", "relative_error")
    return {
        "layer": [layer for layer, _ in keys],
        "gemm": [layer.rpartition(".")[2] for layer, _ in keys],
        "role": [role for _, role in keys],
        **{name: [value] * n for name, value in (constant | counts).items()},
        **{
            name: possible(
                name, USUAL.get(name, 1.0) * random.lognormal(sigma=0.05, size=n) * (grown if name in grows else 1)
            )
            for name in ("scale", "scale_current", *METRICS)
        },
    }


def measure(arguments: list[str]) -> None:
    """Run the command, and print its time and peak memory."""
    program = [sys.executable, "-W", "ignore", "-c", "from nemo_fp8_debug.cli import app; app()", *arguments]
    started = time.perf_counter()
    sink = os.open(os.devnull, os.O_WRONLY)
    child = os.posix_spawn(sys.executable, program, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, sink, 1)])
    _, status, used = os.wait4(child, 0)
    wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    what = " ".join(["compare", *arguments[4:]])
    print(f"{what}: {wall:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of the processor, {used.ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()

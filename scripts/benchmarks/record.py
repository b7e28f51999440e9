"""Measure a large run record: its size, the time to write a sampled step, and the time to read parts of the record.

    .venv/bin/python scripts/benchmarks/record.py [--tensors 1500] [--steps 1000] [--counted 20]

Metrics are written for all steps. Histograms are written only for the last `--counted` steps, because they take most of the
disk space. Each has 2,201 bins, like a normal tensor of 4 Mi values. Reads are timed in this process, with all files in the
page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.writer import RunRecordWriter

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--counted", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write(run, options.tensors, options.steps, options.counted)
        read(run, options.steps)


def write(run: Path, tensors: int, steps: int, counted: int) -> None:
    random = np.random.default_rng(0)
    names = [f"decoder.layers.{i // 4}.{KINDS[i % 4]}" for i in range(-(-tensors // 3))]
    keys = [(name, role) for name in names for role in ROLES][:tensors]
    histograms = histogram_columns(keys, random)
    record = RunRecordWriter(run)
    record.open({})
    took: dict[bool, list[float]] = {False: [], True: []}
    for step in range(steps):
        tables = {"metrics": metric_columns(keys, random), "histograms": histograms if step >= steps - counted else {}}
        sample = Sample(step, tables, {})
        started = time.perf_counter()
        record.record(sample)
        record.record_steps({100 * step + i: {"loss": random.normal(), "time": time.time()} for i in range(100)})
        took[bool(sample.get_table("histograms"))].append(time.perf_counter() - started)
    print(f"{tensors} tensors x {steps} sampled steps")
    for with_histograms, times in took.items():
        if times:
            kind = "metrics and histograms" if with_histograms else "metrics only"
            print(f"write a sampled step, {kind}: median {statistics.median(times) * 1e3:.0f} ms, ", end="")
            print(f"mean {statistics.mean(times) * 1e3:.0f} ms (merging included), worst {max(times) * 1e3:.0f} ms")
    for table, of in (("metrics", steps), ("steps", steps), ("histograms", counted)):
        size = sum(p.stat().st_size for p in (run / table).iterdir()) / max(1, of)
        print(f"size of {table}: {size / 1e3:.0f} kB a sampled step, {size * steps / 1e9:.2f} GB in all")


def metric_columns(keys: list[tuple[str, str]], random: np.random.Generator) -> dict[str, Any]:
    n = len(keys)
    constant = {"recipe": "delayed-hybrid", "format": "e4m3", "dtype": "bfloat16", "scale_source": "engine", "calls": 8}
    counts = {"n": 1 << 22, "nan": 0, "inf": 0}
    return {
        "layer": [layer for layer, _ in keys],
        "gemm": [layer.rpartition(".")[2] for layer, _ in keys],
        "role": [role for _, role in keys],
        **{name: [value] * n for name, value in (constant | counts).items()},
        **{name: random.lognormal(size=n) for name in ("scale", "scale_current", *METRICS)},
    }


def histogram_columns(keys: list[tuple[str, str]], random: np.random.Generator) -> dict[str, Any]:
    """Return histograms of normal tensors: random Poisson counts, whose means are the counts of a real histogram."""
    real = count_histogram(torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).bfloat16()).counts.numpy()
    occupied = real.nonzero()[0]
    counts = [random.poisson(real[occupied]) for _ in keys]
    constant = {"recipe": "delayed-hybrid", "format": "e4m3", "dtype": "bfloat16", "rounded": False, "scale": 64.0}
    return {
        "layer": [layer for layer, _ in keys],
        "role": [role for _, role in keys],
        **{name: [value] * len(keys) for name, value in constant.items()},
        "bins": [occupied[c > 0].astype(np.uint16) for c in counts],
        "counts": [c[c > 0] for c in counts],
    }


def read(run: Path, steps: int) -> None:
    layer = {"layer": "decoder.layers.7.mlp.linear_fc2", "role": "input"}
    timed("one metric of one tensor over all steps", lambda: read_table_rows(run, "metrics", ["step", "mse"], layer))
    for step in (1, steps - 1):
        timed(f"all metrics at step {step}", lambda step=step: read_table_rows(run, "metrics", where={"step": step}))
    timed("all histograms at the last step", lambda: read_table_rows(run, "histograms", where={"step": steps - 1}))
    timed("all losses", lambda: read_table_rows(run, "steps", ["step", "loss"]))
    timed("all metrics of all steps", lambda: read_table_rows(run, "metrics"))


def timed(what: str, call: Callable[[], Any]) -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        rows = len(call())
        times.append(time.perf_counter() - started)
    print(f"read {what}: median {statistics.median(times):.3f} s of 5 ({rows} rows)")


if __name__ == "__main__":
    main()

"""Measure time and peak memory of the analyses and the tab for two records of any size, each in a new process.

    .venv/bin/python scripts/benchmarks/large_records.py [--layers 58] [--experts 256] [--steps 1000] [--folder FOLDER]

The records are for a mixture-of-experts model: three GEMMs for each expert, three operands for each GEMM, and the aggregate
of each layer's experts. The metrics come from a real run (`validation/main_job/records`): each operand follows a real
operand, times a factor of its own and noise. In the bad run, the scale of one operand is wrong by nine bits from the middle
on, and the loss diverges soon after. One operand of each layer has histograms. Parts are merged as by the writer. The script
first prints how much disk space it needs, and deletes the records at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.record import parquet
from nemo_fp8_debug.record.merging import LARGEST
from nemo_fp8_debug.record.reader import read_fingerprint, read_table_rows
from nemo_fp8_debug.record.schema import SCHEMAS, Part, make_arrow_schema
from nemo_fp8_debug.record.writer import RunRecordWriter

REAL = Path(__file__).parents[1] / "validation" / "main_job" / "records" / "baseline" / "fp8_debug"
GEMMS = ("gate_proj", "up_proj", "down_proj")
#: steps between samples
INTERVAL = 10
#: layer and role of the operand whose scale is wrong
CULPRIT = ("model.layers.{}.mlp.experts.7.down_proj", "input")
#: approximate bytes of a row
ROW = 130
#: metrics that are BF16 values of the tensor, and metrics that are float32 scales
_BF16, _FLOAT32 = ("amax", "amin", "unscaled_amax", "unscaled_amin"), ("scale", "scale_current")
#: metrics that depend on the size of the values, to which each operand's own factor applies
_SCALED = ("mse", "amax", "amin", "unscaled_mse", "unscaled_amax", "unscaled_amin", "scale", "scale_current")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="folder of the records; records that are in it are used")
    parser.add_argument("--keep", action="store_true", help="do not delete the records")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are appended")
    options = parser.parse_args()
    operands = len(keys(options.layers, options.experts))
    needed = 2 * operands * options.steps * ROW
    folder = options.folder or Path(tempfile.mkdtemp())
    free = shutil.disk_usage(folder.parent if not folder.exists() else folder).free
    print(
        f"{operands} operands x {options.steps} samples, 2 runs: {needed / 1e9:.1f} GB of disk; {free / 1e9:.1f} GB are free"
    )
    if not (folder / "bad").exists() and needed > 0.95 * free:
        raise SystemExit("That does not fit. Choose another --folder, or fewer --steps.")
    try:
        write_both(folder, options.layers, options.experts, options.steps)
        found = measure(folder, options.layers, operands, options.steps)
        if options.output:
            before = json.loads(options.output.read_text()) if options.output.exists() else []
            options.output.write_text("[\n" + ",\n".join(json.dumps(each) for each in [*before, found]) + "\n]\n")
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def keys(layers: int, experts: int) -> list[tuple[str, str]]:
    """Return layer and role of each operand, in the order of execution."""
    names = ["*", *map(str, range(experts))]
    gemms = [
        f"model.layers.{layer}.mlp.experts.{name}.{gemm}" for layer in range(layers) for name in names for gemm in GEMMS
    ]
    return [(gemm, role) for gemm in gemms for role in ROLES]


def write_both(folder: Path, layers: int, experts: int, steps: int) -> None:
    missing = [name for name in ("baseline", "bad") if not (folder / name).exists()]
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(write, folder / name, layers, experts, steps, name == "bad") for name in missing]
        for job in jobs:
            job.result()


def write(run: Path, layers: int, experts: int, steps: int, harmed: bool) -> None:
    """Write the record of one run."""
    of_run = Courses(keys(layers, experts), seed=int(harmed), harmed=harmed, layers=layers, steps=steps)
    record = RunRecordWriter(run)
    fingerprint = {**read_fingerprint(REAL), "attempt": 0}
    record.open({name: value for name, value in fingerprint.items() if name not in ("schema_version", "attempt")})
    waiting: list[pa.Table] = []
    at_once = max(1, LARGEST // (ROW * len(of_run.keys)))
    for i in range(steps):
        waiting.append(of_run.sample(i))
        if len(waiting) == at_once or i == steps - 1:
            write_merged(run, "metrics", waiting)
            waiting = []
    histograms = [of_run.histograms(i) for i in range(steps)]
    for first in range(0, steps, 256):
        write_merged(run, "histograms", histograms[first : first + 256])
    record.record_steps({step: scalars for i in range(steps) for step, scalars in of_run.losses(i).items()})
    record.close()


def write_merged(run: Path, table: str, tables: list[pa.Table]) -> None:
    """Write a merged part, as `merging` does."""
    content, checksum = parquet.encode_parquet_tables(make_arrow_schema(table), tables)
    first, last = (tables[i]["step"][0].as_py() for i in (0, -1))
    path = run / Part.make_part_name(table, 0, first, last, checksum).path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


class Courses:
    """The metrics of all operands of a run: each follows a real operand, times a factor of its own."""

    def __init__(self, keys: list[tuple[str, str]], seed: int, harmed: bool, layers: int, steps: int) -> None:
        self.keys = keys
        self._random = np.random.default_rng(seed)
        self._harmed_from = steps // 2 if harmed else steps
        self._steps = steps
        self._culprit = keys.index((CULPRIT[0].format(layers // 2), CULPRIT[1]))
        self._layers = layers
        real = read_table_rows(REAL, "metrics")
        tensors = real.group_by("layer", "role", maintain_order=True).agg(pl.all())
        roles = [role for _, role in keys]
        of_role = {role: np.flatnonzero((tensors["role"] == role).to_numpy()) for role in ROLES}
        choice = np.random.default_rng(7)  # equal choices in both runs
        #: index of the real tensor that each operand follows, and by how many samples the operand is shifted
        self._real = np.array([choice.choice(of_role[role]) for role in roles])
        samples = min(tensors["step"].list.len())
        self._behind = choice.integers(0, samples, len(keys))
        self._samples = samples
        self._floats = {
            name: np.array([row[:samples] for row in tensors[name].to_list()], dtype=float)
            for name, kind in SCHEMAS["metrics"].items()
            if kind == pl.Float64 and name != "consumed_samples"
        }
        same = ("gemm", "recipe", "format", "dtype", "scale_source", "calls", "ranks", "ranks_missing", "n", "nan", "inf")
        self._same = {name: np.array([row[0] for row in tensors[name].to_list()], dtype=object)[self._real] for name in same}
        self._factor = choice.lognormal(sigma=0.5, size=len(keys))

    def sample(self, i: int) -> pa.Table:
        """Return the rows of a sampled step."""
        n = len(self.keys)
        # The later half of a real run is steadier, so use the first half once, and repeat the later half.
        at = np.minimum(i, self._samples // 2 + (i + self._behind) % (self._samples // 2))
        noise = self._random.lognormal(sigma=0.02, size=n)
        columns: dict[str, Any] = {
            "attempt": np.zeros(n, np.int32),
            "step": np.full(n, INTERVAL * i),
            "consumed_samples": np.full(n, 512.0 * INTERVAL * i),
            "layer": [layer for layer, _ in self.keys],
            "role": [role for _, role in self.keys],
            **self._same,
        }
        for name, values in self._floats.items():
            columns[name] = self._possible(name, values[self._real, at] * noise * (self._factor if name in _SCALED else 1.0))
        if i >= self._harmed_from:
            self._harm(columns)
        schema = make_arrow_schema("metrics")
        return pa.table([_array(columns.get(field.name), field.type, n) for field in schema], schema=schema)

    def _possible(self, name: str, values: Any) -> Any:
        if name in (*_BF16, *_FLOAT32):
            bits = values.astype(np.float32).view(np.uint32)
            values = (bits & np.uint32(0xFFFF0000 if name in _BF16 else 0xFFFFFFFF)).view(np.float32).astype(float)
        return np.minimum(values, {"cosine": 1.0, "underflow_pct": 100.0, "overflow_pct": 100.0}.get(name, np.inf))

    def _harm(self, columns: dict[str, Any]) -> None:
        at = self._culprit
        columns["scale"][at] *= 2.0**-9
        columns["scale_ratio_log2"][at] -= 9.0
        columns["underflow_pct"][at], columns["relative_error"][at], columns["cosine"][at] = 70.0, 0.8, 0.6
        columns["mse"][at] *= 400.0

    def histograms(self, i: int) -> pa.Table:
        """Return the histograms of a sampled step, one for each layer."""
        n, schema = self._layers, make_arrow_schema("histograms")
        bins = np.arange(14_000, 16_000, dtype=np.uint16)
        columns = {
            "attempt": np.zeros(n, np.int32),
            "step": np.full(n, INTERVAL * i),
            "layer": [f"model.layers.{layer}.mlp.experts.*.down_proj" for layer in range(n)],
            "role": ["input"] * n,
            "recipe": ["delayed-hybrid"] * n,
            "format": ["e4m3"] * n,
            "dtype": ["bfloat16"] * n,
            "rounded": [False] * n,
            "scale": np.full(n, 16.0),
            "bins": [bins] * n,
            "counts": [self._random.poisson(40, len(bins)) for _ in range(n)],
        }
        return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)

    def losses(self, i: int) -> dict[int, dict[str, float]]:
        """Return losses and learning rates of the steps up to the next sample."""
        risen = max(0.0, (i - 1.1 * self._harmed_from) / self._steps)
        losses = 2 + 3 * np.exp(-5 * i / self._steps) + self._random.normal(0, 0.02, INTERVAL) + 2 * risen
        return {INTERVAL * i + j: {"loss": float(loss), "lr": 1e-4} for j, loss in enumerate(losses)}


def _array(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if values is None else pa.array(values, kind)


#: metrics of a tensor that the tab shows by default
SHOWN_FIRST = ("underflow_pct", "relative_error", "amax", "scale_ratio_log2")
#: what is measured, by name: code for a new process, in which `baseline` and `bad` are the folders of the runs
TASKS = {
    "compare": "from nemo_fp8_debug.cli import app; app(['compare', bad, '--baseline', baseline, '--json'])",
    "diagnose": "from nemo_fp8_debug.cli import app; app(['diagnose', bad, '--baseline', baseline, '--json'])",
    "diagnose alone": "from nemo_fp8_debug.cli import app; app(['diagnose', bad, '--json'])",
}


def measure(folder: Path, layers: int, operands: int, steps: int) -> dict[str, Any]:
    """Print and return the time and peak memory of each task. The first task reads from the disk."""
    drop_from_memory(folder)
    size = sum(path.stat().st_size for path in (folder / "bad" / "metrics").iterdir())
    real = bytes_of_real_rows()
    row = size / operands / steps
    print(f"{size / 1e9:.1f} GB of metrics a run, {row:.0f} bytes a row (a real record's: {real:.0f})")
    culprit = CULPRIT[0].format(layers // 2)
    found: dict[str, Any] = {"operands": operands, "samples": steps, "rows": operands * steps, "bytes_a_row": round(row, 1)}
    for name, program in TASKS.items():
        seconds, memory, out = run_alone(program, folder)
        found[name] = {"seconds": round(seconds, 1), "gb": round(memory, 2), "names_the_culprit": culprit in out}
        print(f"{name}: {seconds:.1f} s, {memory:.2f} GB; names the culprit: {culprit in out}", flush=True)
    found["tab"] = measure_tab(folder, culprit, steps)
    print(f"tab: {found['tab']}", flush=True)
    return found


def drop_from_memory(folder: Path) -> None:
    """Drop these files from the page cache. If they filled the memory, processes would have to wait for memory."""
    os.sync()  # data that is not on the disk yet would stay in the cache
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_tab(folder: Path, culprit: str, steps: int) -> dict[str, float]:
    """Return the seconds of each response of a new server, in order, and the peak of the server's memory in GB."""
    step = INTERVAL * (steps // 2)
    asked = {
        "list of runs": "runs?",
        "a run's tensors": "run?run=bad",
        "map of a step": f"frames?run=bad&metric=underflow_pct&from={step}&to={step}",
        "a tensor's course": f"timeline?run=bad&layer={culprit}&role={CULPRIT[1]}&metrics={','.join(SHOWN_FIRST)}",
        "layers by steps": "course?run=bad&metric=underflow_pct&columns=800",
    }
    command = [sys.executable, "-W", "ignore", "-c", "from nemo_fp8_debug.cli import app; app()", "view"]
    with subprocess.Popen([*command, folder / "baseline", folder / "bad"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            at = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
            assert at
            seconds = {name: round(seconds_of(f"{at[0]}data/plugin/fp8/{route}"), 2) for name, route in asked.items()}
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
            assert peak
            return {**seconds, "gb": round(int(peak[1]) / 1e6, 2)}
        finally:
            server.kill()


def seconds_of(address: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(address, timeout=600) as answer:
        answer.read()
    return time.perf_counter() - began


def bytes_of_real_rows() -> float:
    """Return the bytes of a row of the real run, if its parts are merged as by the writer."""
    schema = make_arrow_schema("metrics")
    rows = pa.concat_tables(pq.read_table(path).cast(schema) for path in sorted((REAL / "metrics").iterdir()))
    return len(parquet.encode_parquet_tables(schema, [rows])[0]) / len(rows)


def run_alone(program: str, folder: Path) -> tuple[float, float, str]:
    """Run a program in a new process. Return its seconds, its peak memory in GB, and its output."""
    code = f"baseline, bad = {str(folder / 'baseline')!r}, {str(folder / 'bad')!r}\n{program}"
    started = time.perf_counter()
    with tempfile.TemporaryFile() as sink:
        child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=sink)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        sink.seek(0)
        out = sink.read().decode()
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"failed: {program}")
    return seconds, used.ru_maxrss / 1e6, out


if __name__ == "__main__":
    main()

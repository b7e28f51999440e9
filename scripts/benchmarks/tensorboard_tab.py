"""Measure the speed of the FP8 tab with large records: three runs side by side in TensorBoard and headless Chromium.

    .venv/bin/python scripts/benchmarks/tensorboard_tab.py [--tensors 3000] [--steps 2000] [--keep FOLDER]

All times end when everything is drawn. "First paint" begins when the tab is opened in a running TensorBoard, and ends with a
map of each run and a map of their difference. It is cold if the server has read only the steps of the runs. "Step change"
begins with a click on the button of the next step. "Jump" goes to a step that was not read before, one second after the
previous jump. "Course" begins when the tab is opened, and ends with the picture of all steps of the run against its
baseline. "All steps" is one request for each of the three runs, all at once. We also print the server's peak memory.

The table of runs has 50 runs. We time it from opening the tab until all rows are there, and until the last verdict is there:
first with a server without any verdict, then with a new server that finds the stored verdicts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import browser
import numpy as np

from benchmarks.compare import INTERVAL, KINDS, USUAL, possible
from nemo_fp8_debug.core.keys import SHOWN_AS
from nemo_fp8_debug.numerics.metric_names import METRICS
from nemo_fp8_debug.record.merging import MERGED
from nemo_fp8_debug.record.writer import RunRecordWriter
from nemo_fp8_debug.tensorboard_plugin.web import link

RUNS = ("baseline", "bad", "reference")
#: waits until every map is drawn at the step that the slider shows, and returns the milliseconds since the call
DRAWN = """async (act) => {
    const start = performance.now();
    const step = () => document.querySelector('.steps output')?.textContent.replace('step ', '');
    const before = act ? step() : null;
    act?.();
    const drawn = () => {
        const maps = [...document.querySelectorAll('[data-panel] .chart-box')];
        return step() !== before && maps.length === 4 && maps.every((map) => map.dataset.drawn === step());
    };
    while (!drawn()) await new Promise(requestAnimationFrame);
    return performance.now() - start;
}"""
#: requests all steps of the three runs, in as many columns as the view Course requests, and returns the milliseconds
WHOLE = """async (runs) => {
    const start = performance.now();
    const of = (run) => fetch(`course?run=${run}&metric=underflow_pct&columns=800`).then((answer) => answer.arrayBuffer());
    await Promise.all(runs.map(of));
    return performance.now() - start;
}"""
NEXT = "() => document.querySelector(`.steps button[aria-label='Next sampled step']`).click()"
JUMP = """() => {
    const slider = document.querySelector('.steps input');
    slider.value = %d;
    slider.dispatchEvent(new Event('input', {bubbles: true}));
}"""


STATE = {"run": "bad", "baseline": "baseline", "reference": "reference", "metric": "underflow_pct"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=50, help="number of runs in the table of runs")
    parser.add_argument("--only-table", action="store_true", help="measure only the table of runs")
    parser.add_argument("--keep", type=Path, help="write the records to this folder, or use the records that are in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure_table(Path(scratch) / "table", options.runs)
        if options.only_table:
            return
        folder = options.keep or Path(scratch) / "large"
        for seed, name in enumerate(RUNS):
            if not (folder / name).exists():
                write(folder / name, options.tensors, options.steps, seed, harmed=name == "bad")
        size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
        print(f"3 runs of {options.tensors} tensors x {options.steps} sampled steps, {size / 1e9:.2f} GB")
        measure(folder)


def write(run: Path, tensors: int, steps: int, seed: int, harmed: bool) -> None:
    """Write a record whose parts are already merged."""
    random = np.random.default_rng(seed)
    names = [f"decoder.layers.{i // 4}.{KINDS[i % 4]}" for i in range(-(-tensors // len(SHOWN_AS)))]
    keys = [(name, role) for name in names for role in SHOWN_AS][:tensors]
    record = RunRecordWriter(run)
    record.open({"recipe": {"measured_against": "delayed-hybrid"}})
    for first in range(0, steps, MERGED):
        samples = np.arange(first, min(first + MERGED, steps))
        record.write_part("metrics", columns(keys, samples, random, harmed, steps), *ends(samples))
        record.write_part("steps", scalars(samples, random, harmed, steps), *ends(samples))
    record.close()


def ends(samples: Any) -> tuple[int, int]:
    return int(samples[0]) * INTERVAL, int(samples[-1]) * INTERVAL


def columns(keys: list[tuple[str, str]], samples: Any, random: Any, harmed: bool, steps: int) -> dict[str, Any]:
    rows = len(samples) * len(keys)
    step = np.repeat(samples * INTERVAL, len(keys))
    culprit = np.array([name.endswith("0.mlp.linear_fc2") and role == "input" for name, role in keys])
    grown = np.where(np.tile(culprit, len(samples)) & harmed & (step > steps * INTERVAL / 2), 100.0, 1.0)
    constant = {"recipe": "delayed-hybrid", "format": "e4m3", "dtype": "bfloat16", "scale_source": "engine"}
    counts = {"attempt": 0, "calls": 8, "n": 1 << 22, "nan": 0, "inf": 0}
    worse = ("underflow_pct", "mse", "relative_error")
    return {
        "step": step,
        "layer": [layer for layer, _ in keys] * len(samples),
        "gemm": [layer.rpartition(".")[2] for layer, _ in keys] * len(samples),
        "role": [role for _, role in keys] * len(samples),
        **{name: [value] * rows for name, value in constant.items()},
        **{name: np.full(rows, value) for name, value in counts.items()},
        **{
            name: possible(
                name, USUAL.get(name, 1.0) * random.lognormal(sigma=0.05, size=rows) * (grown if name in worse else 1)
            )
            for name in ("scale", "scale_current", *METRICS)
        },
    }


def scalars(samples: Any, random: Any, harmed: bool, steps: int) -> dict[str, Any]:
    step = np.arange(samples[0] * INTERVAL, (samples[-1] + 1) * INTERVAL)
    losses = 2 + 3 * np.exp(-step / (steps * INTERVAL) * 5) + random.normal(0, 0.02, len(step))
    losses += harmed * (step > 0.6 * steps * INTERVAL)
    return {"attempt": np.zeros(len(step), int), "step": step, "time": 1e9 + step, "loss": losses}


def measure(folder: Path) -> None:
    with browser.tensorboard("--logdir", folder, "--load_fast", "auto") as address, browser.chromium() as chromium:
        time.sleep(5)  # by then, TensorBoard has found the runs
        state = STATE | {"view": "map", "color": "all", "step": 15_000}
        say("first paint, cold", *paint(chromium, address, state))
        again = [paint(chromium, address, state) for _ in range(5)]
        say("first paint, warm", *map(statistics.median, zip(*again, strict=True)))
        page = browser.open_tab(chromium, address, **state)
        tab = page.frames[1]
        tab.evaluate(DRAWN)
        say_of("step change", [change(tab, NEXT) for _ in range(200)])
        say_of("jump to any step", [jump(tab, storage) for storage in range(100, 1900, 150)])
        say("map, changes", *paint(chromium, address, STATE | {"view": "map", "step": 15_000}, maps=2))
        print(f"server's memory    {memory(address):6.0f} MiB at its peak")

    with browser.tensorboard("--logdir", folder, "--load_fast", "auto") as address, browser.chromium() as chromium:
        time.sleep(5)
        say("course, cold", *paint(chromium, address, STATE | {"view": "course"}, "[data-drawn^='underflow_pct against']"))
        say("course, warm", *paint(chromium, address, STATE | {"view": "course"}, "[data-drawn^='underflow_pct against']"))
    with browser.tensorboard("--logdir", folder, "--load_fast", "auto") as address, browser.chromium() as chromium:
        time.sleep(5)
        tab = chromium.new_page()
        tab.goto(f"{address}/data/plugin/fp8/runs")
        print(f"all steps, 3 runs  {tab.evaluate(WHOLE, list(RUNS)):6.0f} ms until all answers are there, cold")
        print(f"all steps, 3 runs  {tab.evaluate(WHOLE, list(RUNS)):6.0f} ms, again")


def measure_table(scratch: Path, runs: int) -> None:
    """Measure the table of runs with 100 tensors and 200 sampled steps each. Half of the runs are harmed."""
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    folder = scratch / "runs"
    for seed, name in enumerate(("baseline", "run-01")):
        write(folder / name, 100, 200, seed, harmed=seed == 1)
    for i in range(2, runs):
        shutil.copytree(folder / ("run-01" if i % 2 else "baseline"), folder / f"run-{i:02}")
    state = {"run": "run-01", "baseline": "baseline", "reference": "", "view": "runs"}
    rows = f"tbody tr:nth-child({runs}) [data-run]"
    for when in ("unknown", "kept"):
        with browser.tensorboard("--logdir", folder, "--load_fast", "auto") as address, browser.chromium() as chromium:
            time.sleep(5)  # by then, TensorBoard has found the runs
            say(f"{runs} runs, {when}", *paint(chromium, address, state, rows))
            say("their verdicts", *paint(chromium, address, state, "text=all are judged"))


def change(tab: Any, act: str) -> float:
    """Return the milliseconds until all maps are drawn at another step."""
    took: float = tab.evaluate(f"() => ({DRAWN})({act})")
    return took


def jump(tab: Any, place: int) -> float:
    """Return the milliseconds until all maps are drawn at a distant step."""
    time.sleep(1)
    return change(tab, JUMP % place)


def say(what: str, whole: float, tab: float) -> None:
    print(f"{what:18} {whole:6.0f} ms with TensorBoard's own page, {tab:.0f} ms for the tab alone")


def say_of(what: str, times: list[float]) -> None:
    late = sorted(times)[-1 - len(times) // 20]
    about = f"median of {len(times)}, 95% below {late:.0f}, at most {max(times):.0f}"
    print(f"{what:18} {statistics.median(times):6.0f} ms, {about}")


def paint(
    chromium: Any, address: str, state: dict[str, Any], selector: str = "[data-panel]", maps: int = 4
) -> tuple[float, float]:
    """Open an address. Return the milliseconds until all is drawn, from the start and from the start of the tab's frame."""
    page = chromium.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(browser.PATIENCE_MS)
    start = time.time()
    page.goto(link(address, **state))
    frame = page.wait_for_selector("iframe").content_frame()
    frame.wait_for_selector(selector)
    if "data-panel" in selector:
        frame.evaluate(DRAWN.replace("=== 4", f"=== {maps}"))
    end, begun = time.time(), frame.evaluate("performance.timeOrigin / 1000")
    page.close()
    return 1000 * (end - start), 1000 * (end - begun)


def memory(address: str) -> float:
    """Return the peak memory, in MiB, of the process that listens at an address."""
    import psutil

    port = int(address.rpartition(":")[2])
    pid = next(c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()

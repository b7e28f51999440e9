"""Trains a small model for long, with everything on and something wrong every few thousand steps, and measures what grows.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/validation/soak.py --steps 200000

Every tenth step is sampled, with Weights & Biases (offline) and triggers. In turn: another interval by the control file, a
control file that is no YAML, a NaN, a spike of the loss, the record's folder gone for a while. Memory, threads, open files,
files of the record and processor time a step are noted every hundredth of the way, the monitor's threads included; soak.json
has them, and what grew over the last three quarters (`growth`), with a 95% interval.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from scipy.stats import theilslopes
from torch import nn

from nemo_fp8_debug import Monitor

RESULTS = Path(__file__).with_suffix(".json")
INTERVAL, WIDTH = 10, 64
#: steps between two faults, and how long one lasts
EVERY, LASTS = 2000, 300
#: what must not grow by more than that over the last three quarters
LIMITS = {"rss_mib": 8.0, "threads": 0.0, "open_files": 0.0, "cpu_ms_a_step": 0.2}
#: files of the record, at the most
MOST_FILES = 500


class Faults:
    """What goes wrong, in turn; each is over after `LASTS` steps."""

    def __init__(self, record: Path) -> None:
        self._record, self._aside = record, record.with_name("aside")
        self._control = record / "control.yaml"
        self.counts = dict.fromkeys(("interval", "no YAML", "nan", "spike", "folder gone"), 0)
        self._over: Callable[[], object] = lambda: None

    def before(self, step: int) -> float:
        """Begin or end one; what the inputs of this step are multiplied by."""
        turn, since = divmod(step, EVERY)
        if since == LASTS:
            self._over()
            self._over = lambda: None
        if since or not turn:
            return 1.0
        name = list(self.counts)[turn % len(self.counts)]
        self.counts[name] += 1
        if name in ("nan", "spike"):
            return float("nan") if name == "nan" else 30.0
        self._begin(name)
        return 1.0

    def _begin(self, name: str) -> None:
        if name == "folder gone":
            self._record.rename(self._aside)
            self._over = self._bring_back
            return
        self._control.write_text("interval: 5\nlayers: ['0']\n" if name == "interval" else "interval: [5\n")
        self._over = lambda: self._control.write_text(f"interval: {INTERVAL}\nlayers: null\n")

    def _bring_back(self) -> None:
        if not self._record.exists():
            self._aside.rename(self._record)


def measured(process: psutil.Process, record: Path) -> dict[str, float]:
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "threads": process.num_threads(),
        "open_files": process.num_fds(),
        "files": sum(len(files) for _, _, files in os.walk(record)),
    }


def soak(folder: Path, steps: int) -> dict[str, Any]:
    """Train, and note what grows."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.chdir(folder)  # where loggers write
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    record = folder / "run"
    monitor = Monitor(
        model, str(record), interval=INTERVAL, recipe="delayed(amax_history_len=16)", table_rows=0,
        loggers=[{"wandb": {"project": "soak", "dir": str(folder)}}],
        triggers=["loss_spike", "nonfinite"],
    )  # fmt: skip
    faults, process, points = Faults(record), psutil.Process(), list[dict[str, float]]()
    spent = time.process_time()
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for step in range(steps):
        times = faults.before(step)
        with monitor.step(step) as report:
            loss = (model(times * x) - x).float().square().mean()
            model.zero_grad()
            loss.backward()
            report(loss=loss)
        if step % (steps // 100) == steps // 100 - 1:
            monitor.flush()
            since, spent = spent, time.process_time()
            cost = 1e3 * (spent - since) / (steps // 100)
            points.append({"step": step + 1, **measured(process, record), "cpu_ms_a_step": round(cost, 4)})
            print(points[-1], flush=True)
    monitor.close()
    files = sum(len(names) for _, _, names in os.walk(record))
    return {"steps": steps, "faults": faults.counts, "files": files, "points": points}


def growth(points: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """By how much each of `LIMITS` grew over the last three quarters: low, middle and high (95%).

    The slope is Theil's and Sen's, the median of those between all pairs of points: a merge of parts takes much for a
    moment, once in a long while.

    Args:
        points: `step` and what was measured at it, in order of steps.

    Example:
        >>> steady = {"threads": 9, "open_files": 11, "cpu_ms_a_step": 2}
        >>> growth([{"step": step, "rss_mib": 500 + step, **steady} for step in range(9)])["rss_mib"]
        [6.0, 6.0, 6.0]
    """
    late = points[len(points) // 4 :]
    at = np.array([point["step"] for point in late])
    found = {}
    for name in LIMITS:
        slope, _, low, high = theilslopes([point[name] for point in late], at)
        found[name] = [round(float((at[-1] - at[0]) * each), 3) for each in (low, slope, high)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="a multiple of 100")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    output = options.output.absolute()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = soak(Path(folder), options.steps)
        os.chdir("/")
    said = sorted({str(w.message).splitlines()[0][:160] for w in caught if "nemo_fp8_debug" in str(w.message)})
    found |= {"growth": growth(found["points"]), "warnings": said}
    output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("growth", "files", "faults", "warnings")}, indent=1))


if __name__ == "__main__":
    main()

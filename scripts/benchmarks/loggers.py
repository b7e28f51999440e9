"""What loggers add to a sampled step: `OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmarks/loggers.py`, about 5 minutes.

The small GPT takes turns: a sampled step and the four steps after it, in which recording goes on, without a logger, with
each of Weights & Biases, MLflow (into files) and Comet, all offline, and without again. A ratio is that of a sampled step,
or of a whole turn, to the mean of the two without a logger in its round; these two are the control. Medians, with 95%
intervals by bootstrap.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any, NamedTuple

from benchmarks.common.paired import Estimate, timed
from benchmarks.common.small_gpt import SmallGPT, one_process
from benchmarks.common.step_costs import BUSY, step
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.loggers.recorder import LoggerRecorder

ROUNDS, WARMUP = 40, 3
#: percent that a logger may add
LIMIT = 5.0


def loggers(folder: str) -> dict[str, list[Any]]:
    """By name; two without."""
    return {
        "none": [],
        "wandb": [{"wandb": {"project": "fp8", "mode": "offline", "dir": folder}}],
        "mlflow": [{"mlflow": {"tracking_uri": f"file://{folder}/mlruns"}}],
        "comet": [{"comet": {"online": False, "project_name": "fp8"}}],
        "none again": [],
    }


@contextlib.contextmanager
def monitors(gpt: SmallGPT, folder: str) -> Iterator[dict[str, Monitor]]:
    """One for each, all on the same model; only the one whose turn it is begins steps."""
    with contextlib.ExitStack() as stack:
        made = {
            name: Monitor(gpt.model, f"{folder}/{name}", interval=BUSY, table_rows=0, verify_rows=2, loggers=chosen)
            for name, chosen in loggers(folder).items()
        }
        for monitor in made.values():
            stack.enter_context(contextlib.closing(monitor))
        yield made


def wait_for_loggers(monitor: Monitor) -> None:
    """Until what was handed to them is done: what they import and open at first is no part of a step."""
    monitor.flush()
    for recorder in monitor._recording.recorders:
        if isinstance(recorder, LoggerRecorder):
            for thread in recorder._threads:
                wait(list(thread._waiting))


class Turn(NamedTuple):
    """Seconds."""

    sampled: float
    whole: float


def turns(gpt: SmallGPT, folder: str) -> dict[str, list[Turn]]:
    """What each turn took, by logger."""
    found, order = defaultdict[str, list[Turn]](list), random.Random(0)
    with monitors(gpt, folder) as made:
        numbers = {name: itertools.count() for name in made}
        for i in range(WARMUP + ROUNDS):
            for name in order.sample(list(made), len(made)):
                taken = [
                    timed(lambda name=name: step(gpt, made[name], next(numbers[name]))).wall  # type: ignore[misc]
                    for _ in range(BUSY)
                ]
                wait_for_loggers(made[name])
                if i >= WARMUP:
                    found[name].append(Turn(taken[0], sum(taken)))
    return found


def main() -> None:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true", "COMET_LOGGING_CONSOLE": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, one_process():
        os.environ["COMET_OFFLINE_DIRECTORY"] = folder
        found = turns(SmallGPT(), folder)
    kept = True
    for of in Turn._fields:
        seconds = {name: [getattr(turn, of) for turn in taken] for name, taken in found.items()}
        without = list(map(statistics.mean, zip(seconds["none"], seconds["none again"], strict=True)))
        for name in ("wandb", "mlflow", "comet"):
            ratio = Estimate.of([taken / base for taken, base in zip(seconds[name], without, strict=True)])
            kept &= ratio.median <= 1 + LIMIT / 100
            print(f"{of:8} {name:8} {ratio.show(3)}")
        control = Estimate.of([a / b for a, b in zip(seconds["none"], seconds["none again"], strict=True)])
        print(f"{of:8} {'none':8} {control.show(3)}")
    print(f"at most {LIMIT:.0f}% more: {'kept' if kept else 'NOT KEPT'} ({ROUNDS} rounds, a turn is {BUSY} steps)")
    sys.exit(not kept)


if __name__ == "__main__":
    main()

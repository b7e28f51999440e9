"""Measure what loggers add to a sampled step.

`OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmarks/loggers.py` takes about 5 minutes.

A turn is a sampled step of the small GPT, and the four steps after it, in which recording continues. A round has five turns:
one each with Weights & Biases, MLflow (into files) and Comet, all offline, and two without a logger. We divide the time of a
sampled step, or of a whole turn, by the mean time of the two turns without a logger. The ratio of these two is the control.

We measure wall time, and also CPU time, which depends less on the load of the machine. The CPU time of the sampled step is
that of the training thread, and the CPU time of the turn is that of all threads. We print medians with 95% bootstrap
intervals. The limit is for the sampled step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any, NamedTuple

from benchmarks.common.paired import Estimate, timed
from benchmarks.common.small_gpt import SmallGPT, one_process
from benchmarks.common.step_costs import BUSY, kept, step
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.loggers.recorder import LoggerRecorder

WARMUP = 3
#: largest allowed ratio of a sampled step's time with a logger to the time without a logger
LIMIT = 1.05


def loggers(folder: str) -> dict[str, list[Any]]:
    """Return the loggers of each turn of a round, by name. Two turns have no logger."""
    return {
        "none": [],
        "wandb": [{"wandb": {"project": "fp8", "mode": "offline", "dir": folder}}],
        "mlflow": [{"mlflow": {"tracking_uri": f"file://{folder}/mlruns"}}],
        "comet": [{"comet": {"online": False, "project_name": "fp8"}}],
        "none again": [],
    }


@contextlib.contextmanager
def monitors(gpt: SmallGPT, folder: str) -> Iterator[dict[str, Monitor]]:
    """Create a monitor for each turn of a round, all on the same model. Only one monitor at a time begins steps."""
    with contextlib.ExitStack() as stack:
        made = {
            name: Monitor(gpt.model, f"{folder}/{name}", interval=BUSY, table_rows=0, verify_rows=2, loggers=chosen)
            for name, chosen in loggers(folder).items()
        }
        for monitor in made.values():
            stack.enter_context(contextlib.closing(monitor))
        yield made


def wait_for_loggers(monitor: Monitor) -> None:
    """Wait until the loggers have no work left. Their first imports and connections are not part of a step."""
    monitor.flush()
    for recorder in monitor._recording.recorders:
        if isinstance(recorder, LoggerRecorder):
            for thread in recorder._threads:
                wait(list(thread._waiting))


class Turn(NamedTuple):
    """The times of a turn, in seconds."""

    #: wall time of the sampled step, and CPU time of the training thread in this step
    sampled: float
    sampled_processor: float
    #: wall time of the whole turn, and CPU time of all threads in this turn
    turn: float
    turn_processor: float


def taken(gpt: SmallGPT, monitor: Monitor, numbers: Iterator[int]) -> Turn:
    """Run a sampled step and the steps after it. Return their times."""
    before, processor = time.perf_counter(), time.process_time()
    sampled = timed(lambda: step(gpt, monitor, next(numbers)))
    for _ in range(BUSY - 1):
        step(gpt, monitor, next(numbers))
    return Turn(*sampled, time.perf_counter() - before, time.process_time() - processor)


def turns(gpt: SmallGPT, folder: str, rounds: int) -> dict[str, list[Turn]]:
    """Return the times of all turns, by logger."""
    found, order = defaultdict[str, list[Turn]](list), random.Random(0)
    with monitors(gpt, folder) as made:
        numbers = {name: itertools.count() for name in made}
        for i in range(WARMUP + rounds):
            for name in order.sample(list(made), len(made)):
                turn = taken(gpt, made[name], numbers[name])
                wait_for_loggers(made[name])
                if i >= WARMUP:
                    found[name].append(turn)
    return found


def main(rounds: int) -> None:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true", "COMET_LOGGING_CONSOLE": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, one_process():
        os.environ["COMET_OFFLINE_DIRECTORY"] = folder
        found = turns(SmallGPT(), folder, rounds)
    for of in Turn._fields:
        seconds = {name: [getattr(turn, of) for turn in each] for name, each in found.items()}
        without = list(map(statistics.mean, zip(seconds["none"], seconds["none again"], strict=True)))
        for name in ("wandb", "mlflow", "comet"):
            ratio = Estimate.of([mine / base for mine, base in zip(seconds[name], without, strict=True)])
            limit = "" if of.startswith("turn") else f"at most {LIMIT}: {kept(ratio.median <= LIMIT)}"
            print(f"{of:18} {name:6} {ratio.show(3)}  {limit}")
        control = Estimate.of([a / b for a, b in zip(seconds["none"], seconds["none again"], strict=True)])
        print(f"{of:18} {'none':6} {control.show(3)}  {rounds} rounds", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)

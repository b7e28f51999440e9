"""What loggers add to a sampled step: `OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmarks/loggers.py`, about 5 minutes.

The small GPT takes turns: a sampled step and the four steps after it, in which recording goes on, without a logger, with
each of Weights & Biases, MLflow (into files) and Comet, all offline, and without again. A ratio is that of a sampled step,
or of a whole turn, to the mean of the two without a logger in its round; these two are the control. Wall time, and processor
time, which the load of the machine touches less: of the training thread in the sampled step, and of all threads in the turn.
Medians, with 95% intervals by bootstrap. What is limited is the sampled step.
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
#: that a logger may make of a sampled step
LIMIT = 1.05


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

    #: of the sampled step, and of it in the training thread's processor time
    sampled: float
    sampled_processor: float
    #: of the turn, and of it in the processor time of all threads
    turn: float
    turn_processor: float


def taken(gpt: SmallGPT, monitor: Monitor, numbers: Iterator[int]) -> Turn:
    """A sampled step, and those after it."""
    before, processor = time.perf_counter(), time.process_time()
    sampled = timed(lambda: step(gpt, monitor, next(numbers)))
    for _ in range(BUSY - 1):
        step(gpt, monitor, next(numbers))
    return Turn(*sampled, time.perf_counter() - before, time.process_time() - processor)


def turns(gpt: SmallGPT, folder: str, rounds: int) -> dict[str, list[Turn]]:
    """What each turn took, by logger."""
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

"""Trains the runs of a plan and keeps, in a folder of each, its record, its losses and what is true of it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from fault_injection.training import train

from held_out.plan import HeldOutRun
from held_out.truths import find_truth, measure_chaos
from nemo_fp8_debug.record.writer import RunRecordWriter

#: steps from one recorded histogram to the next, which no rule reads
_HISTOGRAMS = 50
RECORD, LOSSES, TRUTH, PLAN = "record", "losses.json", "truth.json", "plan.jsonl"
#: name of the folder that a run lies in until it is complete
_UNFINISHED = ".unfinished"


def make_runs(folder: Path, runs: Sequence[HeldOutRun], only: int | None = None, jobs: int = 1) -> None:
    """Train what is not there yet, then write what is true of all runs that are there.

    Args:
        folder: of the set.
        runs: of its plan.
        only: runs that are trained now, at most; None: all.
        jobs: runs that are trained at a time, each on one core.

    Raises:
        SystemExit: the folder has runs of another plan.
    """
    keep_plan(folder, runs)
    missing = [run for run in runs if not (folder / run.name / LOSSES).exists()][:only]
    for number, line in enumerate(train_all(partial(make_run, folder), missing, jobs), 1):
        print(f"{number} of {len(missing)}: {line}", flush=True)
    written = write_truths(folder, runs)
    print(f"{folder}: {len(runs) - _count_missing(folder, runs)} of {len(runs)} runs, {written} truths", flush=True)


def train_all(train_one: Any, runs: Sequence[Any], jobs: int) -> Iterator[str]:
    """Train each run in this process, or in several; yield what is said of each."""
    torch.set_num_threads(1)
    if jobs == 1:
        yield from map(train_one, runs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(train_one, runs)


def keep_plan(folder: Path, runs: Sequence[Any]) -> None:
    """Write the plan beside the runs, or compare it with the one that lies there."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, path = "".join(f"{json.dumps(run.describe())}\n" for run in runs), folder / PLAN
    if path.exists() and path.read_text() != lines:
        raise SystemExit(f"{folder} has runs of another plan; choose another folder")
    path.write_text(lines)


def make_run(folder: Path, run: HeldOutRun) -> str:
    """Train a run and keep its record and losses; return what came of it."""
    began, place = time.process_time(), start_place(folder, run.name)
    losses = train(
        run.setup,
        run.fault,
        open_record(place),
        steps=run.schedule.steps,
        schedule=run.schedule,
        interval=run.interval,
    )
    finish_place(folder, run.name, losses)
    ends = f"{losses[0]:.3f} to {losses[-1]:.3f}"
    return f"{run.name} ({run.setup.engine}): loss {ends}, {time.process_time() - began:.1f} s of a core"


def open_record(place: Path) -> RunRecordWriter:
    """Return what writes the record of a run."""
    return RunRecordWriter(place / RECORD, _HISTOGRAMS)


def start_place(folder: Path, name: str) -> Path:
    """Return an empty folder for a run that is being trained."""
    place = folder / _UNFINISHED / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def finish_place(folder: Path, name: str, losses: Sequence[float]) -> None:
    """Write the losses of a run, and move it to where complete runs lie."""
    place = folder / _UNFINISHED / name
    (place / LOSSES).write_text(json.dumps([loss if math.isfinite(loss) else None for loss in losses]))
    shutil.rmtree(folder / name, ignore_errors=True)
    place.rename(folder / name)


def read_losses(folder: Path, name: str) -> list[float]:
    """Return the losses of a run; NaN stands for all that are not finite."""
    return [math.nan if loss is None else loss for loss in json.loads((folder / name / LOSSES).read_text())]


def write_truths(folder: Path, runs: Sequence[HeldOutRun]) -> int:
    """Write what is true of each run that is there with its counterpart; return of how many."""
    losses = {run.name: read_losses(folder, run.name) for run in runs if (folder / run.name / LOSSES).exists()}
    chaos, written = measure_chaos(runs, losses), 0
    for run in runs:
        if run.is_near or run.name not in losses or run.counterpart not in losses:
            continue
        known = chaos.get(run.setup.family, (0.0, 0))
        told = find_truth(run, losses[run.name], losses[run.counterpart], known)
        (folder / run.name / TRUTH).write_text(json.dumps(told, indent=1) + "\n")
        written += 1
    return written


def _count_missing(folder: Path, runs: Sequence[HeldOutRun]) -> int:
    return sum(not (folder / run.name / LOSSES).exists() for run in runs)

"""Kills a training run that records at random moments, resumes it, and checks after each kill what the record holds.

    .venv/bin/python scripts/validation/crash_recovery.py [--kills 200] [--seed 0]

The run is a real one: a small bfloat16 model, its own checkpoints, a Monitor that samples each step, dumps a layer and has
its parts merged every few steps, so that kills hit writing, merging, tidying up at resume, dumping and the status file
alike. The run says through a pipe which steps are recorded as far as it knows; after `kill -9` each of these must be there,
once, with the values that a run without interruption records, and no file but temporary ones may be unreadable.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import crashing_run
import polars as pl
import torch

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.reader import find_record, read_fingerprint, read_table_rows
from nemo_fp8_debug.record.schema import STATUS, Part
from nemo_fp8_debug.record.storage import FolderStorage

#: seconds that a run lives, at the most
LIFE = 0.9
TABLES = ("metrics", "what_if", "histograms", "steps")
#: what two runs must agree in, bit for bit
COMPARED = {
    "metrics": ["step", "layer", "role", "n", "amax", "amin", "mse", "scale"],
    "what_if": ["step", "layer", "role", "recipe", "n", "mse"],
    "histograms": ["step", "layer", "role", "bins", "counts"],
    "steps": ["step", "loss"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=300, help="steps of a run; one that gets there is followed by another")
    options = parser.parse_args()
    warnings.simplefilter("error")  # a reader that warns has found a damaged part
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Path(folder), options.length, random.Random(options.seed))
        while torture.found["kills"] < options.kills:
            torture.one_run(options.kills)
        print(torture.summary())


@dataclass
class Torture:
    """Runs, kills and checks; keeps count."""

    folder: Path
    length: int
    chance: random.Random
    found: Counter[str] = field(default_factory=Counter)
    took: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # A server that has imported torch forks each run: it starts no thread, which a fork would lose.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # or the server would not find what it imports
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload([crashing_run.__name__])
        self.reference: dict[str, pl.DataFrame] = {}
        whole = self.folder / "reference"
        whole.mkdir()
        self.wait_for(self.start(whole))
        self.reference = {table: read_table_rows(whole / "run", table) for table in TABLES}
        self.reference_dumps = {
            key(FolderStorage(whole / "run"), name): name for *_, name in dumped_files(FolderStorage(whole / "run"))
        }

    def start(self, folder: Path, says: Connection | None = None) -> Any:
        process = self.processes.Process(target=crashing_run.train, args=(folder, self.length, says))
        process.start()
        return process

    def wait_for(self, process: Any) -> None:
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"a run that was not killed ended with exit code {process.exitcode}")

    def one_run(self, kills: int) -> None:
        """Kill and resume a run until it comes to its end, or there were kills enough."""
        folder = self.folder / f"run-{self.found['runs']}"
        folder.mkdir()
        self.found["runs"] += 1
        run = Watched(folder / "run")
        over = False
        while not over and self.found["kills"] < kills:
            over = self.one_life(folder, run)
            self.check(run)
        shutil.rmtree(folder)

    def one_life(self, folder: Path, run: Watched) -> bool:
        """Start the run, and kill it when chance says so; returns whether it came to its end before."""
        hears, says = self.processes.Pipe(duplex=False)
        process = self.start(folder, says)
        says.close()
        # Half of the kills may hit the opening of the record; the others hit training, however slow the machine is.
        steps = self.chance.randrange(3 * crashing_run.CHECKPOINT)
        last = last_word(hears, steps) if self.chance.random() < 0.5 else None
        time.sleep(self.chance.uniform(0, LIFE if self.chance.random() < 0.5 else LIFE / 3))
        if self.chance.random() < 0.5:
            self.aim(run.folder)
        process.kill()
        process.join()
        self.found["kills"] += process.exitcode == -9
        if process.exitcode not in (0, -9):
            raise SystemExit(f"the run ended with exit code {process.exitcode}")
        self.found["before the first step"] += not run.listen(hears, last)
        return bool(process.exitcode == 0)

    def aim(self, folder: Path) -> None:
        """Wait for the midst of a write or a merge, which are too short for chance alone to hit them often."""
        inside = folder / self.chance.choice([".", "metrics", "what_if", "histograms", "steps", "tensors"])
        sign = self.chance.choice([".part", "-steps-"]) if inside.name in ("metrics", "what_if", "steps") else ".part"
        before = names(inside)
        until = time.monotonic() + LIFE
        while time.monotonic() < until:
            if any(sign in name for name in names(inside) - before):
                self.found["aimed kills that saw their aim"] += 1
                return

    def check(self, run: Watched) -> None:
        """All that was said to be recorded is there, once, and as it should be."""
        if not (run.folder / "attempt-0.json").exists():
            return
        storage = find_record(run.folder)
        self.count_remains(run)
        read_fingerprint(storage)
        if STATUS in storage.list_names():
            json.loads(storage.read_file(STATUS))
        for table in TABLES:
            rows = read_table_rows(storage, table)
            self.check_rows(table, rows, run)
            if table == "metrics":
                self.found["samples lost in flight"] += len(run.in_flight - set(rows.select("attempt", "step").iter_rows()))
                self.found["samples kept in flight"] += len(run.in_flight & set(rows.select("attempt", "step").iter_rows()))
        self.check_dumps(storage, run)
        run.in_flight = set()

    def check_rows(self, table: str, rows: pl.DataFrame, run: Watched) -> None:
        attempts = dict(rows.select("step", "attempt").unique().iter_rows())
        for step, attempt in run.recorded.items():
            if attempts.get(step, -1) < attempt:
                fail(run, f"{table}: step {step} was recorded by attempt {attempt}, and is that of {attempts.get(step)}")
        order = [name for name in COMPARED[table] if name not in ("loss", "bins", "counts")][:4]
        mine = rows.select(COMPARED[table]).sort(order)
        expected = self.reference[table].filter(pl.col("step").is_in(list(attempts))).select(COMPARED[table]).sort(order)
        if not mine.equals(expected):
            fail(run, f"{table}: the rows are not those of a run without interruption\n{mine}\n{expected}")
        self.found["rows compared"] += len(mine)

    def check_dumps(self, storage: FolderStorage, run: Watched) -> None:
        there: Counter[tuple[int, int]] = Counter()
        for attempt, step, _, name in dumped_files(storage):
            there[attempt, step] += 1
            if name in run.dumps_read:
                continue
            _, tensors = read_dump(storage, name)
            _, expected = read_dump(
                FolderStorage(self.folder / "reference" / "run"), self.reference_dumps[key(storage, name)]
            )
            if any(not torch.equal(tensors[part].float(), expected[part].float()) for part in expected):
                fail(run, f"{name} is not what a run without interruption dumps")
            run.dumps_read.add(name)
            self.found["dumps compared"] += 1
        for step, attempt in run.recorded.items():
            if there[attempt, step] != len(ROLES):
                fail(run, f"the dumps of step {step} by attempt {attempt} are {there[attempt, step]}")

    def count_remains(self, run: Watched) -> None:
        """What shows where kills hit: temporary files, and merged parts beside those they are made of."""
        for file in run.folder.rglob("*.part"):
            if file not in run.leftovers:
                run.leftovers.add(file)
                kind = file.relative_to(run.folder).parts[0]
                self.found[f"leftover: {'status.json' if kind.startswith('status') else kind}"] += 1
        for table in TABLES:
            parts = [p for file in (run.folder / table).glob("*.parquet") if (p := Part.parse_part_name(table, file.name))]
            merged = [p for p in parts if p.merged]
            small = [p for p in parts if not p.merged]
            self.found["merges cut short"] += any(
                m.attempt == s.attempt and m.first <= s.first <= m.last for m in merged for s in small
            )

    def summary(self) -> str:
        counts = ", ".join(f"{name}: {n}" for name, n in sorted(self.found.items()) if name != "kills")
        seconds = time.monotonic() - self.took
        return f"ok: {self.found['kills']} kills in {seconds:.0f} s; no step lost that was recorded; {counts}"


@dataclass
class Watched:
    """What is known of a run from what it said."""

    folder: Path
    #: attempt that recorded a step last
    recorded: dict[int, int] = field(default_factory=dict)
    #: (attempt, step) that had begun, and may be missing
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    dumps_read: set[str] = field(default_factory=set)
    leftovers: set[Path] = field(default_factory=set)

    def listen(self, hears: Connection, word: tuple[int, int, int] | None) -> bool:
        """Take in what a run said after `word` and before it died; returns whether it said anything."""
        try:
            while hears.poll():
                word = hears.recv()
        except (EOFError, OSError):
            pass
        if word is not None:
            attempt, first, step = word
            self.recorded |= dict.fromkeys(range(first, step), attempt)
            self.in_flight = {(attempt, step)}
        return word is not None


def last_word(hears: Connection, steps: int) -> tuple[int, int, int] | None:
    """What a run says as it begins the step after so many, or the last that it said if it ended before."""
    word = None
    try:
        while word is None or word[2] - word[1] < steps:
            word = hears.recv()
    except EOFError:
        pass
    return word


def names(folder: Path) -> set[str]:
    """Names in a folder, and those in its latest folder of dumps."""
    try:
        found = os.listdir(folder)
        dumps = [name for name in found if "step" in name] if folder.name == "tensors" else []
        latest = max(dumps, key=lambda name: [int(number) for number in name.split("-")[1::2]], default="")
        return {*found, *(os.listdir(folder / latest) if latest else ())}
    except FileNotFoundError:
        return set()


def key(storage: FolderStorage, name: str) -> tuple[Any, ...]:
    """What a dump is, whatever attempt wrote it."""
    about, _ = read_dump(storage, name)
    return about.step, about.layer, about.role, about.call


def fail(run: Watched, why: str) -> None:
    kept = Path(tempfile.mkdtemp(prefix="torture-")) / "run"
    shutil.copytree(run.folder, kept)
    raise SystemExit(f"FAILED: {why}\nthe record is kept in {kept}: {json.dumps(sorted(run.recorded.items())[-3:])}")


if __name__ == "__main__":
    main()

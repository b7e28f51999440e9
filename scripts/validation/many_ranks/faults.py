"""Injects faults into runs of four ranks, again and again, on a busy machine.

    .venv/bin/python -m many_ranks.faults [--times 20] [--faults killed stopped] [--output faults.json]

Hosts are network namespaces, and the record is on a small file system of its own: that takes root. Which rank a fault hits,
and when, is drawn anew each time. Beside the ranks two processes use all the CPU that they get. `--limit` is what training
may wait for other ranks, in all; a product promises 60 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import network_faults
import torch
import torch.distributed as dist
from network_faults import Board, Training, until
from network_hosts import INTERFACE, Hosts, hosts

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.distributed import patience
from nemo_fp8_debug.monitor import monitor as monitors

from .fault_cases import FAULTS, HOST_OF, INTERVAL, WORLD, broken, wrong_with
from .processes import forked, hogs, kill, prepare, statuses, temporary_folder
from .waits import Scheduled

RESULTS = Path(__file__).with_suffix(".json")
PORT, STEP = 29600, 0.02


class UntilTheEnd(Scheduled):
    """Counts what closing waits for as well."""

    def end(self) -> None:
        pass


class Run:
    """The ranks of a run, and what happens to one of them."""

    def __init__(self, name: str, seed: int, limit: float, folder: Path, network: Hosts) -> None:
        self.fault, self._name, self._limit, self._folder, self._network = FAULTS[name], name, limit, folder, network
        self._chance = random.Random(f"{name} {seed}")
        self.victim = self.fault.victims[seed % len(self.fault.victims)]
        self._board, self._processes = Board(), dict[int, int]()

    def take_part(self, rank: int, first: int) -> None:
        """
        Args:
            first: the step that the rank begins with.
        """
        self._network.enter(HOST_OF[rank])
        self._join(rank)
        lie = self._name if rank == self.victim else None
        (self._folder / f"rank-{rank}.json").write_text(json.dumps(self._train(rank, first, lie)))

    def _join(self, rank: int) -> None:
        """A group that needs no gloo, as those of GPUs do not."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        store = dist.TCPStore(self._network.address(0), PORT, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("fake", store=store, rank=rank, world_size=WORLD)

    def _train(self, rank: int, first: int, lie: str | None) -> dict[str, Any]:
        run, plain, board = Training(rank, lie), Training(rank, lie), self._board
        monitors.WaitTimes = UntilTheEnd  # type: ignore[misc]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: dict[str, Any] = {"interval": INTERVAL, "on_error": "warn", "table_rows": 0}
            watching, step = Monitor(run.model, self._folder / "run", **options), first
            if not self.fault.goes_on:
                patience.LONGEST = self._limit  # once all have started, which takes its time on a busy machine
            watching._ranks.patience.refill_budget()
            waits, before = watching._waits, None
            assert isinstance(waits, Scheduled)
            while not board.last or step < board.last:
                if board.failed and before is None:
                    before = waits.total_seconds, waits.without_a_core
                with watching.step(step + (INTERVAL if lie == "other steps" and board.failed else 0)) as report:
                    report(loss=run.step())
                step += 1
                board.steps[rank] = step
                time.sleep(STEP)
            watching.close()
        for _ in run.losses:
            plain.step()
        since = before or (0.0, 0.0)
        waited, core = waits.total_seconds - since[0], waits.without_a_core - since[1]
        return {
            "identical": run.losses == plain.losses and bool(run.losses),
            "waited_s": round(waited, 3),
            "net_s": round(waited - core, 3),
            "warnings": [str(w.message) for w in caught if "nemo_fp8_debug:" in str(w.message)],
        }

    def start(self) -> None:
        """All ranks train, have met, and the first one has recorded."""
        for rank in range(WORLD):
            self._processes[rank] = forked(self.take_part, rank, 0)
        until(lambda: int(self._board.steps.min()) > 2 * INTERVAL, "all ranks train")
        until(lambda: any((self._folder / "run").rglob("metrics/*.parquet")), "ranks have met, and recorded")
        time.sleep(self._chance.uniform(0.0, 10 * STEP))

    def fail(self, lasts: float) -> int:
        """The fault, and its end; the step that it came at."""
        at, victim = int(self._board.steps[self.victim]), self._processes[self.victim]
        seconds = lasts if self.fault.lasts is None else self.fault.lasts
        self._board.failed[0] = time.time()
        if self._name in ("killed", "restarted"):
            kill(victim)
            os.waitpid(self._processes.pop(self.victim), 0)
        if self._name == "restarted":
            time.sleep(self._chance.uniform(0.0, 1.0))
            self._processes[self.victim] = forked(self.take_part, self.victim, at)
        if self._name == "cut off":
            self._network.cut(HOST_OF[self.victim])
        if self._name in ("stopped", "delayed"):
            os.kill(victim, signal.SIGSTOP)
        with full(self._folder / "run") if self._name == "disk full" else contextlib.nullcontext():
            time.sleep(seconds)
        if self._name in ("stopped", "delayed"):
            os.kill(victim, signal.SIGCONT)
        return at

    def end(self) -> dict[str, int | None]:
        """Ranks train on for a while, and end; how each did."""
        alive, seen = list(self._processes), self._board.steps.clone()
        until(lambda: int((self._board.steps - seen)[alive].min()) > 3 * INTERVAL, "ranks train on")
        self._board.end()
        ended = statuses(list(self._processes.values()))
        return dict(zip(map(str, alive), ended, strict=True))

    @property
    def last_step(self) -> int:
        return int(self._board.last)

    def abandon(self) -> None:
        for process in self._processes.values():
            kill(process)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """The file system of a folder is full."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * (1 << 16)):
            pass
    yield
    filler.unlink()


@contextlib.contextmanager
def small_file_system(folder: Path) -> Iterator[None]:
    """16 MiB that nothing else is on."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=True)
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            subprocess.run(["umount", "-l", folder], check=True)


def run_fault(name: str, seed: int, limit: float, folder: Path) -> dict[str, Any]:
    """One run with a fault; what became of its ranks and of its record.

    Args:
        seed: says which rank it hits, and when.
        limit: seconds that training may wait for other ranks.
    """
    owner = os.getpid()
    with hosts(2) as network, small_file_system(folder / "run"):
        run = Run(name, seed, limit, folder, network)
        try:
            run.start()
            at = run.fail(lasts=1.5 * limit)
            ended = run.end()
            found = {str(r): json.loads(p.read_text()) for r in range(WORLD) if (p := folder / f"rank-{r}.json").exists()}
            return {
                "victim": run.victim,
                "failed_at_step": at,
                "last_step": run.last_step,
                "statuses": ended,
                "ranks": found,
                "recorded": recorded(folder / "run"),
            }
        finally:
            if os.getpid() == owner:
                run.abandon()


def recorded(run: Path) -> dict[str, Any]:
    """Steps of the record, of how many ranks its rows are made, and why it cannot be read; None: it can."""
    found: dict[str, Any] = {"steps": [], "ranks": []}
    problem: str | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = network_faults.recorded(run)
        except Exception as error:
            problem = str(error)
    problem = problem or (str(caught[0].message) if caught else None)
    return {"steps": found["steps"], "ranks": [list(row) for row in found["ranks"]], "problem": problem}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--limit", type=float, default=6.0, help="seconds that training waits at the most")
    parser.add_argument("--hogs", type=int, default=2, help="processes that use all the CPU that they get")
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    prepare()
    found: dict[str, Any] = {"torch": torch.__version__, "limit_s": given.limit, "hogs": given.hogs, "faults": {}}
    if given.output.exists():  # faults that are not injected again
        found["faults"] = json.loads(given.output.read_text())["faults"]
    with hogs(given.hogs), temporary_folder() as folder:
        for name in given.faults:
            results = []
            for begin in range(0, given.times, given.together):
                seeds = range(begin, min(given.times, begin + given.together))
                results += at_once(name, list(seeds), given.limit, folder)
            found["faults"][name] = results
            told = [what for result in results for what in wrong_with(result, FAULTS[name], given.limit)]
            print(f"{name}: {len(results)} runs, longest wait {longest(results)} s", *told, sep="\n  ", flush=True)
            given.output.write_text(as_text(found))
    if wrong := broken(found):
        sys.exit("\n".join(wrong))


def as_text(found: dict[str, Any]) -> str:
    """As JSON, a line for each run, so that a difference names the runs that differ."""
    faults = {name: ",\n".join(map(json.dumps, runs)) for name, runs in found["faults"].items()}
    lines = ",\n".join(f"{json.dumps(name)}: [\n{runs}\n]" for name, runs in faults.items())
    about = json.dumps({name: value for name, value in found.items() if name != "faults"})
    return f'{about[:-1]}, "faults": {{\n{lines}\n}}}}\n'


def longest(results: list[dict[str, Any]]) -> float:
    """Seconds that a rank which the fault did not hit waited."""
    waits = [of["net_s"] for run in results for rank, of in run["ranks"].items() if int(rank) != run["victim"]]
    return max(waits, default=0.0)


def at_once(name: str, seeds: list[int], limit: float, folder: Path) -> list[dict[str, Any]]:
    """Runs beside each other, each in a process that starts its ranks."""
    places = [folder / f"{name}-{seed}".replace(" ", "-") for seed in seeds]
    processes = [forked(one, name, seed, limit, place) for seed, place in zip(seeds, places, strict=True)]
    ended = statuses(processes, seconds=600.0)
    assert ended == [0] * len(seeds), (name, seeds, ended)
    return [json.loads((place / "result.json").read_text()) for place in places]


def one(name: str, seed: int, limit: float, place: Path) -> None:
    place.mkdir()
    owner, found = os.getpid(), run_fault(name, seed, limit, place)
    if os.getpid() == owner:
        (place / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

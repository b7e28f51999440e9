"""Injects faults into runs of four ranks, again and again, on a busy machine.

    .venv/bin/python -m many_ranks.faults [--times 20] [--faults killed stopped] [--output faults.json]

Hosts are network namespaces, and the record is on a small file system of its own: that takes root. Which rank a fault hits,
and when, is drawn anew each time. Beside the ranks two processes use all the CPU that they get. `--limit` is what training
may wait for other ranks, in all; a product promises 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from .fault_cases import FAULTS, broken, wrong_with
from .fault_run import run_fault
from .processes import forked, hogs, prepare, statuses, temporary_folder

RESULTS = Path(__file__).with_suffix(".json")


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

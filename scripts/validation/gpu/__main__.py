"""Runs what only a GPU can prove, in parts, and writes one JSON and the tables from it.

    scripts/validation/gpu/run.sh                                            # on a GPU
    scripts/validation/gpu/run.sh --emulate                                  # on a CPU, over emulated kernels
    scripts/validation/gpu/run.sh --results new.json --resume old.json       # the parts that old.json has not finished

Each part is a process of its own and is ended after less than 9 minutes; the JSON is written after each. A call with the
JSON of an earlier one goes on where that ended: parts that failed, were ended or lacked something run again, and each
attempt is kept. PYTHON names the interpreter: what it lacks is listed, and parts that can do without it run.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import tables
from .machine import Machine, commit, environment, examine
from .parts import PARTS, Part
from .processes import run_limited
from .results import Refused, Results, broken, last_attempts

FOLDER = Path(__file__).parent / "results"


def main() -> int:
    """0: every part that was asked for is finished, and what it promises holds."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # parts end with the command
    if options.list:
        print("\n".join(f"{part.name:24} {part.title}" for part in PARTS))
        return 0
    try:
        if options.tables:
            tables.rewrite()
            return 0
        return run(options)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="is written (default: results/DEVICE.json here)")
    parser.add_argument("--resume", type=Path, metavar="OLD.json", help="of an earlier call; it is left as it is")
    parser.add_argument("--part", nargs="+", default=names, choices=names, metavar="NAME", help="default: all of --list")
    parser.add_argument("--emulate", action="store_true", help="on a CPU, over emulated kernels")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the parts (default: PYTHON)")
    parser.add_argument("--minutes", type=float, help="start no part that could take longer than what is left of these")
    parser.add_argument("--limit", type=float, help="seconds after which a part is ended, if less than its own")
    parser.add_argument("--again", action="store_true", help="run finished parts once more; earlier attempts are kept")
    parser.add_argument("--list", action="store_true", help="the parts")
    parser.add_argument("--tables", action="store_true", help="only write the tables of docs/gpu.md")
    return parser


def run(options: argparse.Namespace) -> int:
    """Every part that was asked for."""
    machine = examine(options.python, options.emulate)
    _tell(machine)
    if not (machine.device or machine.emulate):
        raise Refused(
            "no CUDA device that torch can use, so nothing is run; on a CPU, --emulate runs all over emulated kernels"
        )
    path = options.results or FOLDER / f"{_slug(machine)}.json"
    results = Results.open(path, options.resume, machine.about())
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    chosen = [part for part in PARTS if part.name in options.part]
    for number, part in enumerate(chosen, 1):
        limit = min(part.limit, options.limit or part.limit)
        told = f"[{number}/{len(chosen)}] {part.name}"
        if results.finished(part.name) and not options.again:
            print(f"{told}: finished in an earlier call", flush=True)
        elif end and time.monotonic() + limit > end:
            print(f"{told}: not started: it could take {limit:.0f} s; call again to go on", flush=True)
        else:
            print(f"{told}: {part.title}", flush=True)
            attempt = attempted(part, machine, limit)
            results.add(part.name, attempt)
            print(f"{told}: {_outcome(attempt)}", flush=True)
    return _report(results, [part.name for part in chosen])


def attempted(part: Part, machine: Machine, limit: float) -> dict[str, Any]:
    """Run a part; what is noted of it."""
    noted: dict[str, Any] = {
        "title": part.title,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    if cannot := machine.cannot(part.recipe):
        return noted | {"status": cannot[0], "reason": cannot[1], "seconds": 0.0}
    if lacking := machine.lacks(part):
        return noted | {"status": "missing", "reason": f"needs {', '.join(lacking)}", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [machine.python, "-W", "ignore", "-m", "gpu.part", part.name, str(file)]
        ended = run_limited([*command, *(["--emulate"] if machine.emulate else [])], environment(machine, part), limit)
        status = "timed out" if ended.status is None else "failed"
        noted |= {"seconds": round(ended.seconds, 1), "limit": limit, "status": status}
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            found = {}  # it did not come to write anything
        return noted | ({} if "status" in found else {"reason": ended.reason or "wrote nothing"}) | found


def _tell(machine: Machine) -> None:
    """Where this runs, and in a line each what is missing."""
    without = "emulated kernels on a CPU" if machine.emulate else "no CUDA device"
    device = machine.device["name"] if machine.device else without
    print(f"{device}; {', '.join(f'{name} {version}' for name, version in machine.found['versions'].items())}", flush=True)
    for name, why in machine.lacking().items():
        parts = dict.fromkeys(part.kind for part in PARTS if name in machine.wanted(part))
        print(f"missing: {name} ({why}); without it these parts do not run: {', '.join(parts)}", flush=True)


def _outcome(attempt: dict[str, Any]) -> str:
    if attempt.get("reason"):
        return f"{attempt['status']}: {attempt['reason']}"
    return f"{attempt['status']} in {attempt['seconds']:.0f} s"


def _report(results: Results, chosen: list[str]) -> int:
    """Print the tables, and where they are; whether all is well."""
    print(f"\n{tables.tables_of(results.data)}\n")
    if results.path.parent.resolve() == FOLDER:
        tables.rewrite()
        print("docs/gpu.md has these tables")
    last = dict(last_attempts(results.data))
    unfinished = [name for name in chosen if not results.finished(name)]
    promises = [
        f"{name}: {what}" for name in chosen if name in last for what in broken(last[name], results.data["emulated"])
    ]
    for text, names in (("not finished", unfinished), ("BROKEN", promises)):
        if names:
            print(f"{text}: {'; '.join(names)}")
    print(f"{results.path}: {len(chosen) - len(unfinished)} of {len(chosen)} parts finished")
    return int(bool(unfinished or promises))


def _slug(machine: Machine) -> str:
    return re.sub(r"\W+", "-", machine.device["name"].lower()) if machine.device else "emulated"


if __name__ == "__main__":
    sys.exit(main())

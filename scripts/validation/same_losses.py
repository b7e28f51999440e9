"""Check that the monitor changes nothing that a training computes, to the last bit, in some hundred setups.

    PYTHONPATH=. .venv/bin/python scripts/validation/same_losses.py [--output FILE] [FAMILY ...] [--only NAME ...]

Each case trains a tiny model for a few steps, without a monitor and with one. That monitor looks at everything, and raises
all that goes wrong. Losses, gradients, weights, buffers, states of optimizers and of random numbers must have the same bits.
If all cases run, same_losses.json has what came of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from safety_net.processes import TRANSFORMER_ENGINE, run_in_ranks, run_worker

RESULTS = Path(__file__).with_suffix(".json")
#: modules of `safety_net.losses`, and variables that they need
FAMILIES: dict[str, dict[str, str]] = {
    "modules": {},
    "gradients": {},
    "checkpoints": {},
    "optimizers": {},
    "around": {},
    "ranks": {},
    "engines": {},
    "megatron": {"TORCHDYNAMO_DISABLE": "1"},
    "transformer_engine": {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": TRANSFORMER_ENGINE},
    "deepspeed": {"TORCHDYNAMO_DISABLE": "1"},
}
#: outcomes that are no failures
GOOD = ("identical", "impossible")


def work(name: str, folder: Path, only: list[str]) -> int:
    """Run one family's cases in forked ranks, which are started once for each number of ranks."""
    import torch

    cases = importlib.import_module(f"safety_net.losses.{name}").family.cases
    chosen = [case for case in cases if not only or any(fnmatch.fnmatch(case.name, pattern) for pattern in only)]
    torch.set_num_threads(1)
    for world in sorted({case.world for case in chosen}):
        alike = [case for case in chosen if case.world == world]
        while alike:  # a case that ends its process leaves the others to another
            places = [folder / f"{name}-{world}-{rank}.jsonl" for rank in range(world)]
            for place in places:
                place.unlink(missing_ok=True)
            log = folder / f"{name}-{world}-{len(alike)}.log"
            error = run_in_ranks(world, partial(_run, name, alike, folder), log)
            found = _merge([place.read_text() if place.exists() else "" for place in places])
            if error and len(found) < len(alike):
                found[alike[len(found)].name] = {"outcome": "raised", "why": error, "seconds": 0.0}
            for case, told in found.items():
                print(json.dumps({"name": case, "family": name, "ranks": world, **told}), flush=True)
            alike = alike[len(found) :] if error else []
    return 0


def _run(name: str, cases: list[Any], folder: Path, rank: int, world: int) -> None:
    """Run cases in one rank, and write a line for each."""
    import torch
    import torch.distributed as dist
    from safety_net.losses.case import run_case

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    joins = world > 1 or name in ("megatron", "transformer_engine")
    if name == "deepspeed":
        importlib.import_module("safety_net.records.deepspeed_setups").start_deepspeed()
    elif joins:
        dist.init_process_group("gloo")
    groups: list[Any] = []

    def between() -> None:
        if world > 1:
            # torch names groups by their number: without one more, a monitor's would find the addresses of a closed one.
            groups.append(dist.new_group(backend="gloo"))

    with (folder / f"{name}-{world}-{rank}.jsonl").open("w") as lines:
        for number, case in enumerate(cases):
            began = time.monotonic()
            told = run_case(case, folder / f"{name}-{world}-{number}", rank, world, between)
            told["seconds"] = round(time.monotonic() - began, 1)
            lines.write(json.dumps({"name": case.name, **told}) + "\n")
            lines.flush()
    if joins or name == "deepspeed":
        dist.barrier()
        dist.destroy_process_group()


def _merge(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Return the outcome of each case that all ranks finished: the worst of all ranks."""
    of_ranks = [[json.loads(line) for line in text.splitlines()] for text in texts]
    found: dict[str, dict[str, Any]] = {}
    for told in zip(*of_ranks, strict=False):
        bad = [one for one in told if one["outcome"] != "identical"]
        worst = dict(bad[0] if bad else told[0])
        found[worst.pop("name")] = worst
    return found


def run(families: list[str], only: list[str]) -> dict[str, dict[str, Any]]:
    """Run families one after the other, print a line for each case, and return the outcomes."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in families:
            answers, log = Path(place) / f"{name}.answers", Path(place) / f"{name}.log"
            status = run_worker(Path(__file__), "--work", name, place, *only, log=log, output=answers, **FAMILIES[name])
            for line in answers.read_text().splitlines():
                if line.startswith("{"):
                    told = json.loads(line)
                    results[f"{told['family']}: {told.pop('name')}"] = told
                    shown = f"{told['outcome']:10} {told['seconds']:5.1f} s"
                    print(f"{list(results)[-1]:62} {shown}  {told.get('why', '')}", flush=True)
            if status:
                results[f"{name}: all"] = {"outcome": "raised", "why": log.read_text()[-300:], "seconds": 0.0}
                print(f"{name}: its process ended with {status}: {log.read_text()[-1000:]}")
    return results


def main() -> int:
    """Run all cases or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)}; all if none is given")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases to run, names or patterns")
    parser.add_argument("--output", type=Path, help="file to write; same_losses.json if all are run")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, folder, *only = options.work
        return work(name, Path(folder), only)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    began = time.monotonic()
    results = run(options.families or list(FAMILIES), options.only)
    counts = dict(Counter(told["outcome"] for told in results.values()))
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s: {counts}")
    if output := options.output or (None if options.families or options.only else RESULTS):
        import torch

        kept = {name: {k: v for k, v in told.items() if k not in ("seconds", "family")} for name, told in results.items()}
        output.write_text(json.dumps({"torch": torch.__version__, "counts": counts, "cases": kept}, indent=1) + "\n")
    return int(not results or any(outcome not in GOOD for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())

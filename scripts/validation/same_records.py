"""Check that a change of the package leaves every record as it was, to the last bit.

Make the records of two checkouts, and compare them:

    PYTHONPATH=OLD .venv/bin/python scripts/validation/same_records.py make runs/before
    PYTHONPATH=NEW .venv/bin/python scripts/validation/same_records.py make runs/after
    .venv/bin/python scripts/validation/same_records.py compare runs/before runs/after

`make` trains tiny seeded models for a few steps in each engine, and writes one record for each setup. `--only NAME` makes
some setups; a name may be a pattern (`te-*`). The comparison reads Parquet, event and dump files without the package.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path

from safety_net.processes import TRANSFORMER_ENGINE, run_in_ranks, run_worker
from safety_net.records.compare import compare_folders

#: modules of `safety_net.records` by engine, and variables that the engine needs
ENGINES: dict[str, dict[str, str]] = {
    "torch_setups": {},
    "sharded_setups": {},
    "megatron_setups": {"TORCHDYNAMO_DISABLE": "1"},
    "te_setups": {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": TRANSFORMER_ENGINE},
    "deepspeed_setups": {"TORCHDYNAMO_DISABLE": "1"},
}


def make(folder: Path, only: list[str]) -> int:
    """Make the records of all setups, and return 1 if any could not be made."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("nemo_fp8_debug")
    print(f"the package is {spec and spec.origin}", flush=True)
    began = time.monotonic()
    failed = False
    for engine, values in ENGINES.items():
        failed |= run_worker(Path(__file__), "work", engine, folder, *only, log=folder / f"{engine}.log", **values) != 0
    print(f"made in {time.monotonic() - began:.0f} s")
    return int(failed)


def work(engine: str, folder: Path, only: list[str]) -> int:
    """Make the records of one engine's setups in forked ranks."""
    setups = importlib.import_module(f"safety_net.records.{engine}").SETUPS
    chosen = [setup for setup in setups if not only or any(fnmatch.fnmatch(setup.name, name) for name in only)]
    if chosen:
        _import_what_ranks_need()
    failed = False
    for setup in chosen:
        began, place = time.monotonic(), folder / setup.name
        if place.exists():
            shutil.rmtree(place)
        place.mkdir()
        error = run_in_ranks(setup.world, partial(_train, setup, place / "record"), place / "log.txt")
        failed |= bool(error)
        print(f"{setup.name:32} {time.monotonic() - began:5.1f} s  {error and 'FAILED: ' + error}", flush=True)
    return int(failed)


def _train(setup, place: Path, rank: int, world: int) -> None:  # type: ignore[no-untyped-def]
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setup.train(place, rank, world)
    ours = [str(w.message) for w in caught if "nemo_fp8_debug" in str(w.message)]
    (place.parent / f"warnings-{rank}.json").write_text(json.dumps(ours, indent=1))


def _import_what_ranks_need() -> None:
    """Import once what every rank would."""
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    import nemo_fp8_debug

    nemo_fp8_debug.Monitor  # noqa: B018 - loads its modules
    torch.set_num_threads(1)


def main() -> int:
    """Make records or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("make", "work"):
        of = commands.add_parser(command, help="make the records" if command == "make" else argparse.SUPPRESS)
        if command == "work":
            of.add_argument("engine")
            of.add_argument("folder", type=Path)
            of.add_argument("only", nargs="*")
        else:
            of.add_argument("folder", type=Path)
            of.add_argument("--only", nargs="+", default=[], metavar="NAME", help="setups to make, names or patterns")
    of = commands.add_parser("compare", help="compare two sets of records")
    of.add_argument("before", type=Path)
    of.add_argument("after", type=Path)
    of.add_argument("--only", nargs="+", default=[], metavar="NAME", help="setups to compare, names or patterns")
    options = parser.parse_args()
    if options.command == "make":
        return make(options.folder.resolve(), options.only)
    if options.command == "work":
        return work(options.engine, options.folder, options.only)
    return compare_folders(options.before, options.after, options.only)


if __name__ == "__main__":
    sys.exit(main())

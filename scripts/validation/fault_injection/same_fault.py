"""Trains the fault of each held-out run once more, in the run of another seed and other data that it is compared with:
`fault_injection/same_fault.py --family llama --part 300`.

The fault sits in the same place, begins at the same step and is as strong. What it does there is more than any reader of a
record can know of it. How often it does harm in one of the two and not in the other says how well harm can be told by
knowing the fault. A part that is there already is left alone. Without arguments it says what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch

from fault_injection.cases import cases
from fault_injection.families import FAMILIES
from fault_injection.judge import baseline_of, share
from fault_injection.records import FOLDER, read_run, truths
from fault_injection.run_part import surroundings
from fault_injection.sets import HELD_OUT
from fault_injection.training import train
from fault_injection.truth import HARM, gap_of

RESULTS = FOLDER.parent / "same_faults"


def trained_again(family: str, part: int) -> dict[str, float | None]:
    """By name of a run with a fault, the percent by which the same fault in its baseline raises the last losses of that;
    None: they are not finite."""
    told = {one["name"]: one for one in truths("held-out") if one["part"] == f"{family}-{part:03d}"}
    setups = {case.name: case.setup for case in cases(family, part)}
    found: dict[str, float | None] = {}
    for case in cases(family, part):
        if case.fault.kind == "none":
            continue
        began, other = time.monotonic(), str(baseline_of(told[case.name], "other"))
        gap, _ = gap_of(np.array(train(setups[other], case.fault, None)), read_run(told[other]).loss.losses)
        found[case.name] = 100 * gap if np.isfinite(gap) else None
        there = told[case.name]["gap_pct"]
        print(
            f"{family}-{part:03d}/{case.name}: {there} and {found[case.name]}% ({time.monotonic() - began:.1f} s)",
            flush=True,
        )
    return found


def run_family(family: str, parts: list[int]) -> None:
    """Train parts of a family, unless they are there."""
    path = RESULTS / f"{family}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        if f"{part}" not in found:
            found[f"{part}"] = trained_again(family, part)
            path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=())
    parser.add_argument("--part", type=int, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    for family in options.family:
        known = {int(path.stem.rpartition("-")[2]) for path in FOLDER.glob(f"{family}-*.parquet")}
        with surroundings(family):
            run_family(family, options.part or sorted(part for part in known if part >= HELD_OUT))
    if not options.family:
        print(f"harmed in both or in neither: {told()}")
    return 0


def told() -> str:
    """How many of those that were trained again are harmed in both or in neither, as percents with the interval; runs harmed
    or not by a hair are left out, as `judge` does."""
    gaps = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    alike = []
    for one in truths("held-out"):
        family, _, part = one["part"].rpartition("-")
        of_part, gap = gaps.get(family, {}).get(f"{int(part)}", {}), one["gap_pct"]
        if one["name"] in of_part and (gap is None or not 50 * HARM < gap <= 150 * HARM):
            again = of_part[one["name"]]
            alike.append((again is None or again > 100 * HARM) == one["harmful"])
    return share(alike)


if __name__ == "__main__":
    sys.exit(main())

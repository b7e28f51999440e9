"""Trains each run of a part that a fault in an operand has harmed again, as a user would who resumes it from a checkpoint
before the onset that `diagnose` tells, with what `recommend` says: `fault_injection/rescue.py --family llama --part 0`.

The fault stays. A part that is there already is left alone. Without arguments it says how many were rescued so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch

from fault_injection.cases import Case, cases
from fault_injection.families import FAMILIES
from fault_injection.judge import baseline_of
from fault_injection.records import FOLDER, read_run, truths
from fault_injection.run_part import surroundings
from fault_injection.training import INTERVAL, train
from fault_injection.truth import HARM, gap_of
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose, recommend
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.plan.plan import Plan
from nemo_fp8_debug.record.writer import RunRecordWriter

#: steps from a checkpoint to the next
CHECKPOINTS = 20


def rescued(family: str, part: int) -> list[dict[str, Any]]:
    """What becomes of each harmed run of a part when what is recommended is done."""
    told = {one["name"]: one for one in truths("all") if one["part"] == f"{family}-{part:03d}"}
    made = {case.name: case for case in cases(family, part)}
    found = []
    for name, one in told.items():
        if not (one["harmful"] and one["culprits"]) or one["kind"] == "nan_operand":  # which no precision helps against
            continue
        outcome: dict[str, Any] = {"part": one["part"], "name": name, "gap_pct": one["gap_pct"], "rescued": False}
        plan, resumed_at = _recommended(made[name], read_run(told[str(baseline_of(one, "near"))]))
        if plan.changes:
            fault = cases(family, part)[list(made).index(name)].fault  # as it was before it was trained
            losses = np.array(train(made[name].setup, fault, None, plan=plan, resumed_at=resumed_at))
            gap, _ = gap_of(losses, read_run(told[one["counterpart"]]).loss.losses)
            outcome |= {"plan": [asdict(change) for change in plan.changes], "resumed_at": resumed_at}
            outcome["gap_with_plan_pct"] = 100 * gap
            outcome["rescued"] = gap <= HARM
        print(json.dumps({k: v for k, v in outcome.items() if k != "plan"}), flush=True)
        found.append(outcome)
    return found


def _recommended(case: Case, baseline: Run) -> tuple[Plan, int]:
    """What is recommended of a run, which is recorded whole for that, and the step of the checkpoint to resume from."""
    with tempfile.TemporaryDirectory() as folder:
        train(case.setup, case.fault, RunRecordWriter(folder))
        run = Run.read(folder)
        found = diagnose(run, baseline)
        onset = found.divergence_step if found.culprit is None else found.culprit.since
        return recommend(run, baseline).plan, checkpoint_before(onset or 0)


def checkpoint_before(onset: int) -> int:
    """The last checkpoint at or before the last sample that was in order."""
    return max(onset - INTERVAL, 0) // CHECKPOINTS * CHECKPOINTS


def told(folder: Path) -> str:
    """How many runs were rescued, and those that were not, in sentences."""
    found = [outcome for path in sorted(folder.glob("*.json")) for outcome in json.loads(path.read_text())]
    left = [f"{one['part']}/{one['name']}: {one['gap_pct']:.1f}%" for one in found if not one["rescued"]]
    return f"{len(found) - len(left)} of {len(found)} rescued" + (f"; not {', '.join(left)}" if left else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--part", type=int, nargs="+", default=())
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "rescues")
    options = parser.parse_args()
    if options.family is None:
        print(told(options.output))
        return 0
    torch.set_num_threads(1)
    options.output.mkdir(exist_ok=True)
    with surroundings(options.family):
        for part in options.part:
            path = options.output / f"{options.family}-{part:03d}.json"
            if not path.exists():
                path.write_text(json.dumps(rescued(options.family, part), indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

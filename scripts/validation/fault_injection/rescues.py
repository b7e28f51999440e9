"""Resumes each run that a fault in an operand has harmed, from before the fault, with what is recommended:
`fault_injection/rescues.py SEED... --output FOLDER`. The fault stays."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from megatron_lm_loop import one_process

from fault_injection.cases import END, cases, onset_of
from fault_injection.fault import Fault
from fault_injection.training import Training
from fault_injection.verdicts import gap_of, judged, twin_of
from nemo_fp8_debug.plan.plan import Plan


def resumed(folder: Path, seed: int, fault: Fault, plan: Plan) -> dict[int, float]:
    """Losses from the onset on."""
    run = Training(seed, seed, fault, plan=plan)
    run.load_state_dict(torch.load(folder / "onset.pt"))
    losses = {step: run.step(step) for step in range(onset_of(seed), END)}
    run.emulation.detach()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/truth"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with one_process():
        for seed in options.seeds:
            folder = options.output / f"seed-{seed}"
            reference = twin_of(folder)
            without = resumed(folder, seed, Fault(), Plan())
            if any(reference[step] != loss for step, loss in without.items()):
                raise SystemExit(
                    f"seed {seed}: without the fault a resumed run is not the reference run: nothing that follows counts"
                )
            made = {case.name: case.fault for case in cases(seed)}
            for run in judged(folder):
                if not (run.is_numeric and run.is_harmful and run.said.culprit):
                    continue
                plan = run.plan()
                gap, _ = gap_of(resumed(folder, seed, made[run.folder.name](), plan), reference)
                outcome = {"gap": gap, "plan": [asdict(change) for change in plan.changes]}
                (run.folder / "rescue.json").write_text(json.dumps(outcome))
                print(f"{run.name}: {run.gap:+.3f} -> {gap:+.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

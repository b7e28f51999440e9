"""Runs the cases of a seed, each recorded by the monitor: `fault_injection/runs.py SEED... --output FOLDER`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from megatron_lm_loop import one_process

from fault_injection.cases import END, START, Case, cases, onset_of
from fault_injection.fault import Fault
from fault_injection.training import Training
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.record.writer import RunRecord

INTERVAL = 5
#: relative change of the weights of a run that is compared with another: no two real runs are bit-identical
JITTER = 2.0**-9


def prepare(seed: int, folder: Path) -> None:
    """Train to START and to the onset, and keep both states and the losses of the reference run without a fault."""
    run = Training(seed, seed, Fault())
    for step in range(START):
        run.step(step)
    torch.save(run.state_dict(), folder / "start.pt")
    losses = {}
    for step in range(START, END):
        if step == onset_of(seed):
            torch.save(run.state_dict(), folder / "onset.pt")
        losses[step] = run.step(step)
    run.emulation.detach()
    (folder / "reference.json").write_text(json.dumps(losses))


def record(case: Case, folder: Path, jitter: int) -> None:
    """Run a case from START, recorded; anew if it was broken off before."""
    shutil.rmtree(folder / case.name, ignore_errors=True)
    run = Training(case.seed, case.order, case.fault())
    run.load_state_dict(torch.load(folder / "start.pt"))
    run.shake(JITTER, jitter)
    monitor = Monitor(run.model, recorders=[RunRecord(folder / case.name)], interval=INTERVAL)
    for step in range(START, END):
        with monitor.step(step) as report:
            report(loss=run.step(step))
    monitor.close()
    run.emulation.detach()
    fault = run.fault
    described = {"cause": fault.cause, "culprit": fault.culprit, "onset": fault.onset}
    (folder / case.name / "truth.json").write_text(json.dumps(described))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/truth"))
    options: Any = parser.parse_args()
    torch.set_num_threads(1)
    with one_process():
        for seed in options.seeds:
            folder = options.output / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "reference.json").exists():
                prepare(seed, folder)
            for number, case in enumerate([Case("baseline", seed, seed, Fault), *cases(seed)]):
                if not (folder / case.name / "truth.json").exists():
                    record(case, folder, 1000 * seed + number)
                    print(f"seed {seed}: {case.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains a part of the benchmark and keeps its records: `fault_injection/run_part.py --family llama --part 0`.

A part that is there already is left alone, so that it goes on another day. The family `te` is Megatron over Transformer
Engine, whose kernels are emulated: `PYTHONPATH=.venv/te NVTE_MASKED_SOFTMAX_FUSION=0` before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

from fault_injection.cases import Case, cases
from fault_injection.families import FAMILIES, family
from fault_injection.recorder import InMemory
from fault_injection.records import FOLDER, Recorded, write_part
from fault_injection.training import train
from fault_injection.truth import truth


def recorded(case: Case, counterparts: dict[str, list[float]]) -> Recorded:
    """Train a run.

    Args:
        counterparts: losses of the runs before, by name; those of this one are added.
    """
    recorder = InMemory()
    losses = counterparts[case.name] = train(case.setup, case.fault, recorder)
    told = truth(case, losses, counterparts[case.counterpart])
    return Recorded(told, recorder.fingerprint, recorder.metrics, recorder.steps)


def run_part(name: str, part: int, folder: Path) -> None:
    """Train a part, unless it is there."""
    path, counterparts, runs = folder / f"{name}-{part:03d}.parquet", dict[str, list[float]](), list[Recorded]()
    if path.exists():
        print(f"{path} is there", flush=True)
        return
    for case in cases(name, part):
        began = time.monotonic()
        runs.append(recorded(case, counterparts))
        told = runs[-1].truth
        seconds = time.monotonic() - began
        gap = "not finite" if told["gap_pct"] is None else f"{told['gap_pct']:+.2f}%"
        print(f"{path.stem}/{case.name} {case.setup.engine}: gap {gap} ({seconds:.1f} s)", flush=True)
    write_part(path, runs)
    print(f"{path}: {path.stat().st_size >> 10} KiB", flush=True)


def surroundings(name: str) -> AbstractContextManager[None]:
    """What the framework of a family needs around it."""
    _ = family(name)  # Transformer Engine has to be imported before Megatron looks for it
    if name not in ("gpt", "te"):
        return contextlib.nullcontext()
    from megatron_lm_loop import one_process

    return one_process()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--part", type=int, nargs="+", required=True)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with surroundings(options.family):
        for part in options.part:
            run_part(options.family, part, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

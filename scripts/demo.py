"""Runs the three variants of recipes/nemo_gpt.py side by side, then compares them and says what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: megatron-core's fusions compile for longer than this model trains; one thread a run, since the runs share the cores
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that does not exist: earlier runs stay as they are."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{i}") for i in range(2, 1000))]
    return next(c for c in candidates if not c.exists())


def last_step(log: Path) -> str:
    """The title of the last table that a run has printed."""
    found = re.findall(r"FP8 at (step \d+, loss [\d.]+)", log.read_text(errors="replace"))
    return found[-1] if found else "starting"


@contextlib.contextmanager
def printing_to(log: Path) -> Iterator[None]:
    """What this process prints, its libraries included, goes to `log`."""
    streams = sys.stdout, sys.stderr
    own = [os.dup(stream.fileno()) for stream in streams]
    with log.open("w") as file:
        for stream in streams:
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, descriptor in zip(streams, own, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def run(name: str, output: Path, steps: int) -> None:
    from nemo_gpt import train

    with printing_to(output / f"{name}.log"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        try:
            train(name, output, steps, interval=10)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def start(output: Path, steps: int) -> dict[str, BaseProcess]:
    """All variants: forked, since importing NeMo takes as long as a fourth of a run."""
    os.environ |= ENVIRONMENT
    sys.path.append(str(ROOT / "recipes"))
    with printing_to(output / "imports.log"):
        import nemo_gpt  # noqa: F401
    gc.freeze()  # or each run would go through the objects of all modules, and copy their memory
    fork = multiprocessing.get_context("fork")
    runs = {name: fork.Process(target=run, args=(name, output, steps)) for name in ("good", "bad", "twin")}
    for process in runs.values():
        process.start()
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--steps", type=int, default=360)
    arguments = parser.parse_args()
    output = fresh_folder(arguments.output)
    output.mkdir(parents=True)

    began = time.monotonic()
    running = start(output, arguments.steps)
    while any(process.is_alive() for process in running.values()):
        time.sleep(10)
        progress = "   ".join(f"{name}: {last_step(output / f'{name}.log')}" for name in running)
        print(f"[{time.monotonic() - began:4.0f} s] {progress}", flush=True)
    if failed := [name for name, process in running.items() if process.exitcode]:
        print(f"{', '.join(failed)} failed; see {output}/*.log", file=sys.stderr)
        return 1

    command = Path(sys.executable).with_name("nemo-fp8-debug")
    good, bad, twin = (output / name for name in ("good", "bad", "twin"))
    status = subprocess.run([command, "compare", good, bad, "--twin", twin]).returncode
    status = status or subprocess.run([command, "diagnose", bad, "--good", good, "--twin", twin]).returncode
    print(f"\nTo see it:  {Path(sys.executable).with_name('tensorboard')} --logdir {output}")
    print(f"and open    {the_worst(good, bad)}")
    return status


def the_worst(good: Path, bad: Path) -> str:
    """Where the tab shows the tensor that drifted farthest."""
    from nemo_fp8_debug.analysis.compare import compare
    from nemo_fp8_debug.tensorboard_plugin.links import link

    layer, role = compare(good, bad).tensors.select("layer", "role").row(0)
    return link(run="bad", good="good", twin="twin", view="map", figure="underflow_pct", layer=layer, role=role)


if __name__ == "__main__":
    sys.exit(main())

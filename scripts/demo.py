"""Train four variants of recipes/nemo_gpt.py, diagnose the two bad runs, and repair the run that FP8 broke."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_fp8_debug.core.keys import SHOWN_AS

if TYPE_CHECKING:
    from nemo_fp8_debug.analysis.diagnosis.diagnose import Diagnosis

ROOT = Path(__file__).parents[1]
RESCUED = "rescued"
ABOUT = {
    "baseline": "a good run in FP8",
    "learning_rate": "its learning rate rises until it diverges",
    "reference": "learning_rate in BF16",
    "stuck_scale": "an outlier in the amax history keeps one scale too small",
    RESCUED: "stuck_scale, resumed with the advised change",
}
VARIANTS = tuple(name for name in ABOUT if name != RESCUED)
#: steps between samples
INTERVAL = 10
#: seconds between two lines of progress, and seconds that a run gets to end by itself
REPORTED, ENDS_WITHIN = 10, 5
PORT = 6006


@dataclass(frozen=True)
class Rescue:
    """A run to resume: the step, the changes in words, and the options of `train` in the recipe."""

    step: int
    changes: str
    options: dict[str, str]


class Stopped(Exception):
    """The user or the system ended the demo."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "demo", help="folder of the records; never overwritten"
    )
    parser.add_argument("--steps", type=int, default=240, help="number of steps of each run")
    arguments = parser.parse_args()
    output = fresh_folder(arguments.output)
    output.mkdir(parents=True)
    try:
        train_all(output, arguments.steps)
    except (KeyboardInterrupt, Stopped):
        print(f"\nStopped. The data recorded so far is in {output}", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def fresh_folder(wanted: Path) -> Path:
    """Return `wanted`, or the first of `wanted-2`, `wanted-3`, ... that does not exist, so that earlier runs are kept."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{i}") for i in range(2, 1000))]
    return next(c for c in candidates if not c.exists())


def train_all(output: Path, steps: int) -> None:
    """Train all variants at once, diagnose the bad runs, and repair the run that FP8 broke.

    Raises:
        RuntimeError: a run failed. All other runs are ended.
        Stopped: somebody ended the demo. All runs are ended.
    """
    signal.signal(signal.SIGTERM, stop)
    print(f"Four runs of {steps} steps, recorded in {output}. NeMo takes half a minute to start.", flush=True)
    import_nemo(output / "imports.log")
    checkpoints = steps // 6
    save = {"stuck_scale": {"save_interval": checkpoints}}
    train_runs({name: save.get(name, {}) for name in VARIANTS}, output, steps)
    verdicts = diagnose_runs(output)
    rescue = advise(output, verdicts["stuck_scale"], checkpoints)
    if rescue:
        print(f"\nWe resume stuck_scale from step {rescue.step}, with {rescue.changes}:", flush=True)
        train_runs({RESCUED: rescue.options}, output, steps)
    report(output, verdicts, rescue)


def train_runs(wanted: dict[str, dict[str, Any]], output: Path, steps: int) -> None:
    """Train variants at once, each with its own options of the recipe, and print their progress."""
    fork = multiprocessing.get_context("fork")  # do not import NeMo again, which takes a fourth of a run's time
    runs: dict[str, BaseProcess] = {
        name: fork.Process(target=run, args=(name, output, steps, options)) for name, options in wanted.items()
    }
    try:
        for process in runs.values():
            process.start()
        watch(runs, output, steps)
    finally:
        end(runs)


def stop(*_: object) -> None:
    raise Stopped


def import_nemo(log: Path) -> None:
    """Import the modules that all runs use. demo.sh sets the number of threads, because that must precede this import."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core's fusions compile for longer than this model trains
    with printing_to(log):
        import nemo_gpt  # noqa: F401
    gc.freeze()  # otherwise, garbage collection in each run would touch, and so copy, the memory of all modules


@contextlib.contextmanager
def printing_to(log: Path) -> Iterator[None]:
    """Redirect all output of this process, including that of its libraries, to `log`."""
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


def run(name: str, output: Path, steps: int, options: dict[str, Any]) -> None:
    """Train one variant, in a process that ends with the demo."""
    from nemo_gpt import train

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but the demo ends its runs itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: if the demo dies, the kernel ends this process
    with printing_to(output / f"{name}.log"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        try:
            train(name, output, steps, interval=INTERVAL, **options)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def watch(runs: dict[str, BaseProcess], output: Path, steps: int) -> None:
    """Print the progress of the runs until all have ended."""
    began, shown = time.monotonic(), {-1}
    print(write_row("time", "left", "step", *runs))
    while any(process.is_alive() for process in runs.values()):
        multiprocessing.connection.wait([p.sentinel for p in runs.values() if p.is_alive()], timeout=REPORTED)
        if failed := [name for name, process in runs.items() if process.exitcode]:
            raise RuntimeError(failure(output / f"{failed[0]}.log"))
        losses = {name: read_losses(output / f"{name}.log") for name in runs}
        if (step := max(set.intersection(*map(set, losses.values())), default=-1)) not in shown:
            shown.add(step)
            print(progress(losses, steps, time.monotonic() - began), flush=True)


def failure(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"The run '{log.stem}' failed: {last.strip()}\nIts full output is in {log}"


def read_losses(log: Path) -> dict[int, str]:
    """Return the loss of each sampled step, from the titles of the tables in a run's log."""
    found = re.findall(
        r"(?:FP8|what FP8 would do) at step (\d+), loss ([\d.]+|nan|inf)",
        log.read_text(errors="replace") if log.exists() else "",
    )
    return {int(step): loss for step, loss in found}


def progress(losses: dict[str, dict[int, str]], steps: int, seconds: float) -> str:
    """Return a table row with the losses of all runs at the last step that all runs have sampled."""
    common = set.intersection(*map(set, losses.values()))
    step, first = max(common, default=0), min(common, default=0)
    left = f"{seconds * (steps - step) / max(step - first, INTERVAL):.0f} s" if common else "?"
    return write_row(f"{seconds:.0f} s", left, str(step), *(each.get(step, "") for each in losses.values()))


def write_row(passed: str, left: str, step: str, *losses: str) -> str:
    """Return a row of the progress table. It fits into 80 columns."""
    return f"{passed:>6}{left:>8}{step:>6}" + "".join(f"{each[:13]:>15}" for each in losses)


def end(runs: dict[str, BaseProcess]) -> None:
    """End all runs that have not ended yet."""
    started = [process for process in runs.values() if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join(ENDS_WITHIN)
        process.kill()
        process.join()


def diagnose_runs(output: Path) -> dict[str, Diagnosis]:
    """Return the diagnoses of the two bad runs, by name."""
    from nemo_fp8_debug import diagnose

    return {
        "learning_rate": diagnose(output / "learning_rate", output / "baseline", output / "reference"),
        "stuck_scale": diagnose(output / "stuck_scale", output / "baseline"),
    }


def advise(output: Path, diagnosis: Diagnosis, checkpoints: int) -> Rescue | None:
    """Write the recommended plan. Return how to resume with it, or None if there is no change or no checkpoint."""
    from nemo_fp8_debug import recommend

    plan = recommend(output / "stuck_scale", output / "baseline").plan
    if diagnosis.culprit is None or diagnosis.culprit.since is None or not plan.changes:
        return None
    step = (diagnosis.culprit.since - INTERVAL) // checkpoints * checkpoints  # the sample before this step was good
    resume = output / "stuck_scale" / "checkpoints" / f"step_{step}"
    if not resume.exists():
        return None
    plan.save(output / "plan.json")
    changes = ", ".join(
        f"{' and '.join(map(SHOWN_AS.__getitem__, c.roles))} of {c.layer} in {c.recipe}" for c in plan.changes
    )
    return Rescue(step, changes, {"plan": str(output / "plan.json"), "resume": str(resume)})


def report(output: Path, verdicts: dict[str, Diagnosis], rescue: Rescue | None) -> None:
    """Print the final losses, the verdicts, the repair, and the commands that show the details."""
    from nemo_fp8_debug import diagnose
    from nemo_fp8_debug.analysis.diagnosis.narrator import tell_loss_outcome

    names = (*VARIANTS, *([RESCUED] if rescue else []))
    gap = verdicts["stuck_scale"].loss.gap
    print(f"\n{compare_ends(output, names, gap.first if gap else 0)}")
    said = {name: verdict.verdict() for name, verdict in verdicts.items()}
    if rescue:
        loss = tell_loss_outcome(diagnose(output / RESCUED, output / "baseline").loss)
        said[RESCUED] = f"stuck_scale from step {rescue.step} on, with {rescue.changes}. {loss}"
    for name, verdict in said.items():
        print("\n" + textwrap.fill(f"{name}: {verdict}", 100, break_on_hyphens=False))
    commands, port = Path(sys.executable).parent, free_port(PORT)
    if port != PORT:
        print(f"\nPort {PORT} is taken, so this uses port {port}.")
    command = f"{commands / 'nemo-fp8-debug'} diagnose {output / 'stuck_scale'} --baseline {output / 'baseline'}"
    print(f"\nTo see it:  {commands / 'tensorboard'} --logdir {output} --port {port}")
    print(f"and open    {address(port, view='verdict')}")
    print(f"In a table: {command}")


def compare_ends(output: Path, names: Sequence[str], first: int) -> str:
    """Return a table with each run's mean loss from a step on, its gap to the baseline's mean loss, and its description."""
    from nemo_fp8_debug.analysis.runs.run import Run

    losses = {name: Run.read(output / name).loss for name in names}
    ends = {name: float(np.nanmean(each.losses[each.steps >= first])) for name, each in losses.items()}
    lines = [f"{'run':14}{'loss':>6}{'to baseline':>13}   what it is"]
    for name, end in ends.items():
        percent = round(100 * (end / ends["baseline"] - 1), 1) + 0.0  # adding 0.0 turns -0.0 into 0.0
        gap = "" if name == "baseline" else f"{percent:+.1f}%".replace("-", "\N{MINUS SIGN}")
        lines.append(f"{name:14}{end:6.2f}{gap:>13}   {ABOUT[name]}")
    return "\n".join(lines)


def free_port(wanted: int) -> int:
    """Return `wanted`, or the first port after it on which no process listens."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            return port
    return wanted


def address(port: int, **state: object) -> str:
    """Return the address at which the tab shows a state of the runs."""
    from nemo_fp8_debug.tensorboard_plugin.web import link

    return link(f"http://localhost:{port}", run="stuck_scale", baseline="baseline", reference="", **state)


if __name__ == "__main__":
    sys.exit(main())

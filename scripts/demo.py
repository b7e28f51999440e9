"""Trains the three variants of recipes/nemo_gpt.py side by side, then says which run is bad, why, and how to see it."""

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
import time
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIANTS = ("baseline", "bad", "reference")
INTERVAL = 10
#: seconds between two lines of progress, and those that a run has to end by itself
REPORTED, ENDS_WITHIN = 10, 5
PORT = 6006


class Stopped(Exception):
    """The user or the system ended the demo."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "demo", help="folder of the records; never overwritten"
    )
    parser.add_argument("--steps", type=int, default=360, help="of each run")
    arguments = parser.parse_args()
    output = fresh_folder(arguments.output)
    output.mkdir(parents=True)
    try:
        train_all(output, arguments.steps)
        report(output)
    except (KeyboardInterrupt, Stopped):
        print(f"\nStopped. What was recorded so far is in {output}", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that does not exist: earlier runs stay as they are."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{i}") for i in range(2, 1000))]
    return next(c for c in candidates if not c.exists())


def train_all(output: Path, steps: int) -> None:
    """Train all variants at once and print their progress.

    Raises:
        RuntimeError: one of them failed; the others are ended.
        Stopped: the demo was told to end, and so were they.
    """
    signal.signal(signal.SIGTERM, stop)
    names = ", ".join(VARIANTS)
    print(f"Three runs of {steps} steps ({names}), recorded in {output}; NeMo takes half a minute to start.", flush=True)
    import_nemo(output / "imports.log")
    fork = multiprocessing.get_context("fork")  # importing NeMo takes as long as a fourth of a run
    runs: dict[str, BaseProcess] = {n: fork.Process(target=run, args=(n, output, steps)) for n in VARIANTS}
    try:
        for process in runs.values():
            process.start()
        watch(runs, output, steps)
    finally:
        end(runs)


def stop(*_: object) -> None:
    raise Stopped


def import_nemo(log: Path) -> None:
    """Import what the runs share. The number of threads is set by demo.sh, which is before torch is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core's fusions compile for longer than this model trains
    with printing_to(log):
        import nemo_gpt  # noqa: F401
    gc.freeze()  # or each run would go through the objects of all modules, and copy their memory


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
    """Train one variant, in a process that ends with the demo."""
    from nemo_gpt import train

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the demo ends its runs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the kernel ends it where the demo no longer can
    with printing_to(output / f"{name}.log"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        try:
            train(name, output, steps, interval=INTERVAL)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def watch(runs: dict[str, BaseProcess], output: Path, steps: int) -> None:
    """Print where the runs are until all have ended."""
    began = time.monotonic()
    while any(process.is_alive() for process in runs.values()):
        multiprocessing.connection.wait([p.sentinel for p in runs.values() if p.is_alive()], timeout=REPORTED)
        if failed := [name for name, process in runs.items() if process.exitcode]:
            raise RuntimeError(failure(output / f"{failed[0]}.log"))
        reached = {name: last_sample(output / f"{name}.log") for name in runs}
        print(progress(reached, steps, time.monotonic() - began), flush=True)


def failure(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"The run '{log.stem}' failed: {last.strip()}\nAll that it printed is in {log}"


def last_sample(log: Path) -> tuple[int, str]:
    """Step and loss in the title of the last table that a run has printed."""
    found = re.findall(
        r"(?:FP8|what FP8 would do) at step (\d+), loss ([\d.]+|nan|inf)",
        log.read_text(errors="replace") if log.exists() else "",
    )
    return (int(found[-1][0]), found[-1][1]) if found else (0, "-")


def progress(reached: dict[str, tuple[int, str]], steps: int, seconds: float) -> str:
    """A line that fits 80 columns: how far the slowest run is, an estimate of what is left, and the losses."""
    done = min(step for step, _ in reached.values())
    left = f"about {seconds * (steps - done) / done:.0f} s left" if done else "starting"
    losses = ", ".join(loss for _, loss in reached.values())
    return f"[{seconds:4.0f} s] step {done} of {steps}, {left}; losses {losses}"


def end(runs: dict[str, BaseProcess]) -> None:
    """End what still runs."""
    started = [process for process in runs.values() if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join(ENDS_WITHIN)
        process.kill()
        process.join()


def report(output: Path) -> None:
    """Print the verdict, and where to see what it rests on."""
    from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose

    baseline, bad, reference = (output / name for name in VARIANTS)
    print(f"\n{diagnose(bad, baseline, reference).verdict()}\n")
    commands = Path(sys.executable).parent
    port = free_port(PORT)
    if port != PORT:
        print(f"Port {PORT} is taken, so this uses port {port}.")
    print(f"To see it:  {commands / 'tensorboard'} --logdir {output} --port {port}")
    print(f"and open    {address(port, view='verdict')}")
    print(f"In tables:  {commands / 'nemo-fp8-debug'} compare {bad} --baseline {baseline} --reference {reference}")
    print(f"            {commands / 'nemo-fp8-debug'} diagnose {bad} --baseline {baseline} --reference {reference}")
    print(f"Records:    {baseline}, {bad}, {reference}")


def free_port(wanted: int) -> int:
    """`wanted`, or the first port after it that nobody listens on."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            return port
    return wanted


def address(port: int, **state: object) -> str:
    """At which the tab shows a state of the three runs."""
    from nemo_fp8_debug.tensorboard_plugin.web import link

    return link(f"http://localhost:{port}", run="bad", baseline="baseline", reference="reference", **state)


if __name__ == "__main__":
    sys.exit(main())

"""Processes that tests start: a script to its end, and the ranks of a run, which share one import of what they need."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

#: seconds after which a test gives up waiting: far more than a slow and busy machine needs, so that no result depends on it
GUARD = 400.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return once `condition()` holds."""
    until = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < until, "gave up waiting"
        time.sleep(0.02)


def found_in(*folders: str | Path) -> str:
    """PYTHONPATH of a process that finds modules in `folders` first, and then where this one does."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))


def finished(*command: object, seconds: float = GUARD, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a command printed and how it ended. A test that gives up, after some seconds, ends all processes of it."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        told, errors = process.communicate(timeout=seconds)
    except BaseException:
        end_all(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, told, errors)


def end_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
    process.communicate()


def run_script(*command: str | Path, **environment: str | None) -> str:
    """Run a script, or `-m` and a module, which has to end well; what it printed. None takes a variable away."""
    inherited = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    values = {name: value for name, value in (inherited | environment).items() if value is not None}
    done = finished(sys.executable, "-W", "ignore", *command, env=values)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def in_ranks(world: int, train: Callable[..., object], *arguments: object, frees_memory: bool = True) -> None:
    """`train(rank, world, *arguments)` in so many processes, from a script that has imported all but trained nothing itself.

    Ranks are forked, since their imports take longer than most of what they do, and find each other as under torchrun.
    When one fails the others are ended, and so is the script.

    Args:
        frees_memory: they end as any interpreter does; otherwise they leave the last of it out, which takes longer than some
            of them train: to free the memory of all modules.
    """
    _prepare()
    gc.freeze()  # or each rank would go through all of the modules' objects once more when it ends
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = []
    for rank in range(world):
        if not (process := os.fork()):
            os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            train(rank, world, *arguments)
            if not frees_memory:
                _end_without_freeing()
            sys.exit()
        ranks.append(process)
    _wait_for(ranks)


def _end_without_freeing() -> None:
    """Wait for threads and call what is to be called at the end, as an interpreter does before it frees memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def in_turn(run: Callable[[str], object], cases: Iterable[str]) -> list[int]:
    """The exit statuses of `run(case)`, each in a process of its own that may end as it likes; forked as ranks are."""
    _prepare()
    gc.freeze()
    statuses = []
    for case in cases:
        if not (process := os.fork()):
            run(case)
            sys.exit()
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return statuses


def _prepare() -> None:
    """Load what the first sample would in every rank: the compiled kernel, and what pyarrow looks for to write a table."""
    import pandas  # noqa: F401
    import torch

    from nemo_fp8_debug.kernels import count_histogram
    from nemo_fp8_debug.monitor import recorder_queue

    recorder_queue.PATIENCE = GUARD
    count_histogram(torch.zeros(1, dtype=torch.bfloat16))


def _wait_for(processes: list[int]) -> None:
    left = set(processes)
    while left:
        ended, status = os.wait()
        left.discard(ended)
        if status:
            for process in left:
                os.kill(process, signal.SIGKILL)
            sys.exit(f"rank {processes.index(ended)} ended with {os.waitstatus_to_exitcode(status)}")

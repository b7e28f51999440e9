"""Ranks as processes of this machine, forked once all that they need is imported, and processes that only use the CPU."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: seconds after which a process is taken to hang
GUARD = 300.0


def prepare() -> None:
    """Load what the first sample would in every rank."""
    import pandas  # noqa: F401  # what writes tables looks for it
    import torch

    from nemo_fp8_debug import Monitor
    from nemo_fp8_debug.kernels import count_histogram

    torch.set_num_threads(1)
    count_histogram(torch.zeros(1, dtype=torch.bfloat16))
    Monitor(torch.nn.Linear(4, 4), recorders=[]).close()  # versions of packages, which take a second to find out
    gc.freeze()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def forked(work: Callable[..., object], *arguments: Any) -> int:
    """A process that ends as any interpreter does; its number."""
    if process := os.fork():
        return process
    try:
        work(*arguments)
    except SystemExit:  # of a process that this one forked in turn, and that comes by as it ends
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


def statuses(processes: list[int], seconds: float = GUARD) -> list[int | None]:
    """How processes ended; None: one did not in time, and was killed."""
    until = time.monotonic() + seconds
    ended: dict[int, int | None] = {}
    while len(ended) < len(processes):
        for process in set(processes) - set(ended):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                ended[process] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                kill(process)
                os.waitpid(process, 0)
                ended[process] = None
        time.sleep(0.01)
    return [ended[process] for process in processes]


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """So many processes that use all the CPU that they get."""
    owner = os.getpid()
    processes = [forked(_spin, owner) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes if os.getpid() == owner else ():  # one that was forked meanwhile comes by as it ends
            kill(process)
            os.waitpid(process, 0)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Deleted by the process that made it."""
    folder, owner = Path(tempfile.mkdtemp()), os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10_000))

"""Processes that train: one for each engine, which imports the engine once, and forked ranks in it."""

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
import traceback
from collections.abc import Callable
from pathlib import Path

VALIDATION = Path(__file__).resolve().parents[1]
ROOT = VALIDATION.parents[1]
#: seconds after which ranks that hang are ended
LIMIT = 300.0
_HELPERS = (VALIDATION, ROOT / "recipes")
#: where Transformer Engine is, which other engines must not find
TRANSFORMER_ENGINE = str(Path(sys.prefix) / "te")


def extend_environment(**values: str) -> dict[str, str]:
    """Return the environment of a worker: whoever chose the package by PYTHONPATH comes first, then our helpers.

    Args:
        values: variables that the engine needs.
    """
    chosen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, (*chosen, *map(str, _HELPERS), values.pop("PYTHONPATH", ""))))
    threads = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | {"PYTHONPATH": path, "TORCH_CUDA_ARCH_LIST": "9.0", "DS_ACCELERATOR": "cpu"} | threads | values


def run_worker(script: Path, *arguments: object, log: Path, output: Path | None = None, **values: str) -> int:
    """Run a script in a process of its own, and return its exit status.

    Args:
        script: that is run.
        arguments: of the script.
        log: file for what it and its engine print to standard error.
        output: file for what it prints; None: it prints where this process does.
        values: variables of its environment.
    """
    command = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
    environment = extend_environment(**values)
    with log.open("w") as errors, output.open("w") if output else contextlib.nullcontext() as printed:
        return subprocess.run(command, env=environment, stdout=printed, stderr=errors).returncode


def run_in_ranks(world: int, train: Callable[[int, int], object], log: Path) -> str:
    """Call `train(rank, world)` in forked processes that find each other as under torchrun.

    If a rank fails, we end the others.

    Args:
        world: number of ranks.
        train: called in each.
        log: file for what they print.

    Returns:
        "" if all ranks ended well, otherwise the error of the first that did not.
    """
    gc.freeze()  # or each rank goes through all objects of all modules when it ends
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.write_text("")
    ranks = {_fork_rank(rank, world, port, train, log): rank for rank in range(world)}
    return _wait_for(ranks, log)


def _fork_rank(rank: int, world: int, port: int, train: Callable[[int, int], object], log: Path) -> int:
    sys.stdout.flush()
    if process := os.fork():
        return process
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    status = 0
    try:
        train(rank, world)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to free the memory of all modules takes longer than some ranks train


def _wait_for(ranks: dict[int, int], log: Path) -> str:
    until, left, failed = time.monotonic() + LIMIT, set(ranks), ""
    while left:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in left:
            left.discard(process)
            if status and not failed:
                failed = f"rank {ranks[process]}: {_last_error(log)}"
        if failed or time.monotonic() > until:
            for process in left:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            return failed or f"hung for {LIMIT:.0f} s"
        if not process:
            time.sleep(0.01)
    return failed


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return (errors or lines or ["it was killed"])[-1][:200]

"""Runs a command up to a limit, and ends it with every process that it has started, those in other sessions too."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: in the environment of a command and of all that it starts
MARK = "NEMO_FP8_DEBUG_VALIDATION"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    #: None: it was ended at its limit
    status: int | None
    seconds: float

    @property
    def reason(self) -> str:
        """In words; empty when it ended well."""
        if self.status is None:
            return f"ended after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by signal {-self.status}"
        return f"ended with status {self.status}" if self.status else ""


def run_limited(command: Sequence[str], environment: Mapping[str, str], limit: float) -> Ended:
    """Run to the end or the limit in seconds; nothing of it is left when this returns or raises."""
    mark = uuid.uuid4().hex
    started = time.monotonic()
    process = subprocess.Popen(command, env={**environment, MARK: mark}, start_new_session=True)
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end_all(mark)
        process.wait()
    return Ended(status, time.monotonic() - started)


def end_all(mark: str) -> None:
    """End all processes with this mark; they may start others until none is found."""
    while found := marked(mark):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)  # until the system has taken them down


def marked(mark: str, name: str = MARK) -> list[int]:
    """Processes that carry the mark in their environment and have not ended."""
    sign = f"{name}={mark}".encode()
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and sign in _environment(folder)]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")  # empty when it has ended
    except OSError:
        return []

"""Processes that setup starts: silent unless they fail, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Failed(Exception):
    """A process failed; says which, and what it printed last."""


class Processes:
    """Starts processes that hold the lock `lock`, a file descriptor, while they run."""

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._guard = threading.Lock()

    def run(self, *command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Run a command to its end.

        Raises:
            Failed: it did not end well.
        """
        arguments = [str(argument) for argument in command]
        with self._guard:
            if self._ended:
                raise Failed("interrupted")
            try:
                process = subprocess.Popen(
                    arguments,
                    cwd=cwd,
                    env=os.environ | dict(environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                    pass_fds=[self._lock],
                )
            except OSError as error:
                raise Failed(f"{arguments[0]} cannot be started: {error.strerror}") from error
            self._running.add(process)
        printed, _ = process.communicate()
        self._running.discard(process)
        if process.returncode:
            raise Failed(f"{_shown(arguments)} failed:\n{printed.strip()[-4000:]}")

    def kill(self) -> None:
        """End all that run, with what they started; no other starts."""
        with self._guard:
            self._ended = True
            running = list(self._running)
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _shown(arguments: Sequence[str]) -> str:
    text = " ".join(arguments)
    return text if len(text) < 200 else f"{text[:200]} ..."

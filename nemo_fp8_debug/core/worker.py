"""Work off the training thread, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A thread that does jobs one after the other.

    A daemon: a job that hangs for ever must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Do `job` after all that was submitted before."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, seconds: float) -> None:
        """End when all is done; wait for that so long at the most."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while entry := self._jobs.get():
            job, future = entry
            try:
                future.set_result(job())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)


def run_in_background(name: str, job: Callable[[], Any]) -> Future[Any]:
    """Do one job in a thread of that name, which ends with it."""
    worker = Worker(name)
    future = worker.submit(job)
    worker.close(0.0)
    return future

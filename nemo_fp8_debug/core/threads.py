"""Run jobs in order outside the training thread, or on several cores at once with a limited number of waiting results."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


#: limits on the number of cores from nested `at_most` contexts, the innermost last
_asked: list[int] = []


def cores() -> int:
    """Return the number of cores that this process uses."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([there, *_asked[-1:]])


@contextlib.contextmanager
def limit_cores(some: int) -> Iterator[None]:
    """Use at most this many cores inside the context."""
    _asked.append(some)
    try:
        yield
    finally:
        _asked.pop()


def map_in_threads(do: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield `do` of each item in order. At most as many items run at once as there are cores. As many results may wait.

    Example:
        >>> list(map_in_threads(abs, [-2, 3, -1]))
        [2, 3, 1]
    """
    if len(items) < 2 or cores() < 2:
        yield from map(do, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(cores()) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(do, item))
                if len(waiting) > cores():
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class WorkerThread:
    """A thread that runs jobs one after the other.

    The thread is a daemon, because a job that hangs forever must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` after all earlier jobs. Return a future of its result."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, seconds: float) -> None:
        """End the thread when its jobs are done. Wait at most this many seconds for the end."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while entry := self._jobs.get():
            job, future = entry
            try:
                future.set_result(job())
            except BaseException as error:  # `Future.result` raises the error in its caller
                future.set_exception(error)


def run_in_background(name: str, job: Callable[[], Any]) -> Future[Any]:
    """Run one job in a thread with this name, which ends after the job. Return a future of the job's result."""
    worker = WorkerThread(name)
    future = worker.submit(job)
    worker.close(0.0)
    return future

"""A logger's own thread, and what may wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from ...core.threads import Worker
from ...errors import warn
from .sink import Sink

#: calls that may wait for a logger that is slow or hangs; what comes after them is dropped
WAITING = 200
#: seconds after which a call is taken to hang: the end of a run does not wait for it
HANGING = 120.0


class LoggerThread:
    """Does what a sink is asked for, in order. What it raises costs a warning of each kind, and nothing else."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._worker = Worker(f"nemo_fp8_debug {sink.name}")
        self._waiting: deque[Future[None]] = deque()
        self._began = 0.0
        self._usable = True
        self._dropped = 0
        self._warned: set[type] = set()

    def submit(self, job: Callable[[Sink], None], needed: bool = False, last: bool = False) -> None:
        """Do `job` after all before it; never waits.

        Args:
            needed: without it nothing after it can be done, as after opening the run.
            last: it belongs to the end of the run, and is not dropped.
        """
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) >= WAITING and not last:
            if not self._dropped:
                warn(f"{self.sink.name} does not keep up, or hangs; what it would get now is dropped, and the run goes on")
            self._dropped += 1
            return
        self._waiting.append(self._worker.submit(lambda: self._do(job, needed)))

    def _do(self, job: Callable[[Sink], None], needed: bool) -> None:
        if not self._usable:
            return
        self._began = time.monotonic()
        try:
            job(self.sink)
        except BaseException as error:
            self._usable = not needed
            if type(error) not in self._warned:
                self._warned.add(type(error))
                lost = "it gets nothing of this run" if needed else "what it was given is lost"
                warn(f"the logger {self.sink.name} failed, and {lost}: {type(error).__name__}: {error}")

    @property
    def _hangs(self) -> bool:
        return self._began > 0 and time.monotonic() - self._began > HANGING

    def finish(self, deadline: float) -> None:
        """Wait until all is done, but neither past `deadline` (of `time.monotonic`) nor for a call that hangs."""
        pending = [future for future in self._waiting if not future.done()]
        while pending and time.monotonic() < deadline and not self._hangs:
            wait(pending, max(0.0, min(1.0, deadline - time.monotonic())))
            pending = [future for future in pending if not future.done()]
        if pending:
            warn(f"the logger {self.sink.name} hangs or is slow; {len(pending)} calls to it are given up")
        self._worker.close(0.0 if pending else 1.0)

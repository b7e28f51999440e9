"""Measure and record outside the training thread, in order and one sample at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ..core.sample import Recorder, Sample
from ..core.threads import WorkerThread
from ..core.waits import LOGGERS, RECORDING, WaitTimes
from ..errors import is_exception_underway, warn
from ..record.loggers.recorder import LoggerRecorder

#: seconds that training may wait for an earlier sample before a warning
PATIENCE = 1.0
#: seconds after which we assume that a write hangs, for example because a network file system is gone; training goes on
STUCK = 30.0
#: largest number of jobs that may wait while a write hangs
WAITING = 1000

Steps = Mapping[int, Mapping[str, Any]]
#: function that passes data to a recorder
Record = Callable[[Recorder], None]
ErrorGuard = Callable[[str], AbstractContextManager[None]]
_T = TypeVar("_T")


class RecorderQueue:
    """Passes samples to recorders in a background thread, or in the caller's thread if a recorder requires that."""

    def __init__(
        self, recorders: Iterable[Recorder], fingerprint: Mapping[str, Any], errors: ErrorGuard, waits: WaitTimes
    ) -> None:
        """
        Args:
            recorders: recorders, opened in order. If a recorder raises an error, later recorders make no files.
            errors: returns a context that keeps errors out of the training loop. The argument describes the guarded action.
            waits: adds up the training thread's waiting times.

        Raises:
            ConfigError: a recorder cannot write to its folder.
        """
        self._errors, self._waits = errors, waits
        self.recorders: list[Recorder] = []
        for recorder in recorders:
            recorder.open(fingerprint)
            self.recorders.append(recorder)
        self._submitted = 0
        self._impatient = False
        self.stuck = False
        self._closing = False
        #: whether the recorders were closed
        self.closed = False
        self._pending: deque[Future[Record | None]] = deque()
        self._worker = WorkerThread("nemo_fp8_debug recording")

    def submit_sample(self, measure: Callable[[], Sample | None]) -> None:
        """Measure and record a sample in the background, if there is one.

        Wait for the previous sample first, which limits memory.
        """
        self.deliver(wait=True)
        self._submitted += 1
        self._enqueue(lambda: self._record("while measuring", measure, lambda recorder, sample: recorder.record(sample)))

    def submit_steps(self, steps: Callable[[], Steps]) -> None:
        """Record scalars by step in the background."""
        self._enqueue(lambda: self._record("while recording steps", steps, lambda recorder, of: recorder.record_steps(of)))

    def submit_validation(self, step: int, losses: Callable[[], Mapping[str, float]]) -> None:
        """Record the losses of an evaluation in the background."""

        def hand(recorder: Recorder, found: Mapping[str, float]) -> None:
            recorder.record_validation(step, found)

        self._enqueue(lambda: self._record("while recording an evaluation", losses, hand))

    def submit_job(self, job: Callable[[], None]) -> None:
        """Run another job in the background, after all jobs that were submitted before."""

        def guarded() -> None:
            with self._errors("in the background"):
                job()

        self._enqueue(guarded)

    def deliver(self, wait: bool) -> None:
        """Pass finished samples to recorders that run in the caller's thread. If `wait` is set, wait for the current sample.

        The wait ends after `STUCK` seconds. Then `stuck` is true until the job is done.
        """
        only_first = self._submitted == 1  # the first sample may compile kernels, so a longer interval would not help
        started = time.monotonic()
        while self._pending and (self._pending[0].done() or (wait and self._wait_for(self._pending[0], started))):
            self.stuck = False
            if record := self._pending.popleft().result():
                with self._waits.measure_wait(LOGGERS):
                    self._each(True, record)
        waited = time.monotonic() - started
        if waited > PATIENCE and not (only_first or self._impatient or self.stuck):
            self._impatient = True
            warn(f"training waited {waited:.1f} s for an earlier sample to be recorded; a longer interval avoids it")

    def close(self) -> None:
        """Wait until everything is recorded, and end the thread."""
        self._closing = True
        self._enqueue(lambda: self._here(lambda recorder: recorder.close()))
        self.deliver(wait=True)
        self.closed = True
        if self.stuck:
            warn(f"{len(self._pending)} recording jobs wait for a write that does not end. Their data is lost")
        else:
            self._worker.close(PATIENCE)
        for recorder in self.recorders:
            if isinstance(recorder, LoggerRecorder):
                recorder.finish_runs(is_exception_underway())

    def _enqueue(self, job: Callable[[], Record | None]) -> None:
        if self.stuck and len(self._pending) >= WAITING:
            return
        self._pending.append(self._worker.submit(job))  # on_error="raise" passes errors to the training thread

    def _wait_for(self, future: Future[Any], started: float) -> bool:
        """Return whether `future` is done in time.

        Args:
            started: start of the wait by the monotonic clock. At the end of a run, each job has its own start.
        """
        if self.stuck and not self._closing:  # do not wait again for a write that already hangs
            return False
        limit = STUCK if self._closing else max(0.0, started + STUCK - time.monotonic())
        with self._waits.measure_wait(RECORDING):
            wait([future], limit)
        if not future.done() and not self.stuck:
            self.stuck = True
            warn(f"recording has been blocked for {STUCK:.0f} s. The run goes on, and sampling is paused until it recovers")
        return future.done()

    def _record(self, doing: str, measure: Callable[[], _T | None], hand: Callable[[Recorder, _T], None]) -> Record | None:
        with self._errors(doing):
            if (found := measure()) is not None:
                return self._here(lambda recorder: hand(recorder, found))
        return None

    def _here(self, record: Record) -> Record:
        """Call the recorders that run in this thread. Return the calls that remain for the caller's thread."""
        self._each(False, record)
        return record

    def _each(self, in_callers_thread: bool, call: Record) -> None:
        for recorder in self.recorders:
            if recorder.in_callers_thread == in_callers_thread:
                with self._errors(f"in {type(recorder).__name__}"):
                    call(recorder)

"""Measuring and recording off the training thread: in order, one sample at a time, dropping nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from ..errors import warn
from ..sample import Recorder, Sample

#: seconds of training time that waiting for an earlier sample may cost before a warning says so
PATIENCE = 1.0

Steps = Mapping[int, Mapping[str, float]]
#: hands one thing to a recorder
Record = Callable[[Recorder], None]
Faults = Callable[[str], AbstractContextManager[None]]


class Recording:
    """Hands samples to recorders: in a thread of its own, or in the caller's where a recorder asks for that."""

    def __init__(self, recorders: Iterable[Recorder], fingerprint: Mapping[str, Any], faults: Faults) -> None:
        """
        Args:
            recorders: opened one by one as they come, so that an earlier one can refuse before a later one makes files.
            faults: a context, named by what it guards, that keeps a fault from the run.

        Raises:
            ConfigError: a recorder cannot write where it should.
        """
        self._faults = faults
        self._recorders: list[Recorder] = []
        for recorder in recorders:
            recorder.open(fingerprint)
            self._recorders.append(recorder)
        self._impatient = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nemo_fp8_debug")
        self._pending: deque[Future[Record | None]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nobody records: on ranks that do not write, and once closed."""
        return not self._recorders

    def submit(self, measure: Callable[[], Sample]) -> None:
        """Measure and record a sample in the background; waits for the one before, which bounds the memory."""
        self.deliver(wait=True)
        self._pending.append(self._thread.submit(self._record, measure))

    def submit_steps(self, steps: Callable[[], Steps]) -> None:
        """Record scalars by step in the background."""
        self._pending.append(self._thread.submit(self._record_steps, steps))

    def deliver(self, wait: bool) -> None:
        """Pass what is ready to the recorders of the caller's thread; wait for what is under way, if asked."""
        started = time.monotonic()
        while self._pending and (wait or self._pending[0].done()):
            if record := self._pending.popleft().result():
                self._each(True, record)
        if (waited := time.monotonic() - started) > PATIENCE and not self._impatient:
            self._impatient = True
            warn(f"training waited {waited:.1f} s for an earlier sample to be recorded; a longer interval avoids it")

    def close(self) -> None:
        """Wait until all is recorded, and end."""
        self.deliver(wait=True)
        for in_callers_thread in (True, False):
            self._each(in_callers_thread, lambda recorder: recorder.close())
        self._recorders = []
        self._thread.shutdown()

    def _record(self, measure: Callable[[], Sample]) -> Record | None:
        with self._faults("while measuring"):
            sample = measure()
            return self._here(lambda recorder: recorder.record(sample))
        return None

    def _record_steps(self, steps: Callable[[], Steps]) -> Record | None:
        with self._faults("while recording steps"):
            values = steps()
            return self._here(lambda recorder: recorder.record_steps(values))
        return None

    def _here(self, record: Record) -> Record:
        """Serve the recorders of this thread; what is left to do in the caller's is returned."""
        self._each(False, record)
        return record

    def _each(self, in_callers_thread: bool, call: Record) -> None:
        for recorder in self._recorders:
            if recorder.in_callers_thread == in_callers_thread:
                with self._faults(f"in {type(recorder).__name__}"):
                    call(recorder)

"""Recording off the training thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..sample import Recorder, Sample


class Background:
    """Lets another recorder work in a thread of its own, in order; drops nothing.

    A fault surfaces at a later call, named by what was being recorded. When recording falls behind by more than `BACKLOG`
    calls, the training thread waits for the oldest.
    """

    BACKLOG = 8

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Open at once, so that an error of the configuration stops the run before its first step."""
        self._recorder.open(fingerprint)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nemo_fp8_debug_record")

    def record(self, sample: Sample) -> None:
        """Hand over one sampled step."""
        self._submit(self._recorder.record, sample)

    def record_losses(self, losses: Mapping[int, float]) -> None:
        """Hand over losses."""
        self._submit(self._recorder.record_losses, losses)

    def close(self) -> None:
        """Wait until all is recorded."""
        if self._thread is None:
            return
        self._submit(self._recorder.close)
        self._thread.shutdown(wait=True)
        self._thread = None
        self._settle(0)

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._thread is None:
            raise RuntimeError("recording is closed")
        self._pending.append(self._thread.submit(call, *arguments))
        self._settle(self.BACKLOG)

    def _settle(self, backlog: int) -> None:
        """Look at what is done, and wait until no more than `backlog` calls are left; raises the first fault found."""
        faults = []
        while self._pending and (self._pending[0].done() or len(self._pending) > backlog):
            if error := self._pending.popleft().exception():
                faults.append(error)
        if faults:
            raise faults[0]

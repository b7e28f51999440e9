"""What is too large for TensorBoard's own process: one child process at a time, and its memory goes with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from .memory import MEMORY, budget, memory_of

#: seconds after which a job that nobody asks about is stopped, and a failure or a result of a grown record is forgotten
_ABANDONED, _STALE = 60.0, 30.0
#: seconds after which one that waits makes room for others if nobody has asked about it, and that one may run for
_UNASKED, _LONGEST = 5.0, 1800.0
#: finished jobs that are kept, and such as wait
_KEPT, _WAITING = 8, 16
#: seconds between two looks at the child
_LOOK = 0.1
_TOO_LARGE = (
    "It was stopped, since it took more than {:.3g} GiB of memory. Run `nemo-fp8-debug` on the records, or start "
    f"TensorBoard with the environment variable {MEMORY} set to more."
)
# The child finds its modules where this process does; the folder that it is started in is not among them.
_PROGRAM = "import sys; sys.path[:] = {}; from nemo_fp8_debug.tensorboard_plugin.jobs.worker_process import main; main()"


@dataclass
class _Job:
    what: Mapping[str, Any]
    version: str
    asked: float
    began: float
    #: what is known so far; None: nothing
    partial: Any = None
    answer: dict[str, Any] | None = None
    ended: float = 0.0
    delivered: bool = field(default=False)

    def is_stale(self, version: str, now: float) -> bool:
        """Whether it is to be done again: a record has grown since, or it failed a while ago. A result is delivered once."""
        if self.answer is None or not self.delivered or now - self.ended < _STALE:
            return False
        return self.version != version or self.answer["state"] == "failed"


class Jobs:
    """Jobs by what they are; one runs, others wait."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._running: _Job | None = None
        atexit.register(self.stop)

    def ask(self, what: Mapping[str, Any], version: str) -> dict[str, Any]:
        """How far a job is; begins it where it is new.

        Args:
            what: the request, as `child.main` takes it.
            version: of all records that it reads.

        Returns:
            state: working (for how many seconds, and what is known so far), done (and its result), or failed (and why).
        """
        key, now = json.dumps(what, sort_keys=True), time.monotonic()
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_stale(version, now):
                self._forget()
                self._make_room(now)
                if sum(held.answer is None for held in self._jobs.values()) >= _WAITING:
                    return {"state": "failed", "error": "Too much is being computed already; try again in a minute."}
                job = self._jobs[key] = _Job(what, version, now, now)
            job.asked = now
            if job.answer is None:
                self._work()
                return {"state": "working", "seconds": round(now - job.began, 1), "partial": job.partial}
            job.delivered = True
            return job.answer

    def stop(self) -> None:
        """End what runs."""
        with self._lock:
            self._jobs.clear()
        if self._child is not None:
            _kill(self._child)

    def _forget(self) -> None:
        """Leave room for one more result."""
        finished = sorted((key for key, job in self._jobs.items() if job.answer), key=lambda key: self._jobs[key].asked)
        for key in finished[: max(0, len(finished) - _KEPT + 1)]:
            del self._jobs[key]

    def _make_room(self, now: float) -> None:
        """Drop jobs that wait and that nobody asks about, if too many wait."""
        waiting = [key for key, job in self._jobs.items() if job.answer is None and job is not self._running]
        if len(waiting) >= _WAITING - 1:
            for key in waiting:
                if now - self._jobs[key].asked > _UNASKED:
                    del self._jobs[key]

    def _work(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name="fp8-jobs", daemon=True)
            self._worker.start()

    def _run(self) -> None:
        while job := self._next():
            try:
                answer = self._done(job)
            except Exception as error:
                answer = _failed(f"It could not be computed ({type(error).__name__}: {error}).")
            with self._lock:
                job.answer, job.ended = answer, time.monotonic()

    def _next(self) -> _Job | None:
        with self._lock:
            now = time.monotonic()
            waiting = {key: job for key, job in self._jobs.items() if job.answer is None}
            for key, job in list(waiting.items()):
                if now - job.asked > _ABANDONED:
                    del self._jobs[key], waiting[key]
            if not waiting:
                self._worker = None
            self._running = next(iter(waiting.values()), None)
            return self._running

    def _done(self, job: _Job) -> dict[str, Any]:
        """Run a job in a child; stopped when nobody asks any more, or when it takes too long or too much memory."""
        began, most = time.monotonic(), budget()
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM.format(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._child = child
        said: list[Any] = []
        assert child.stdin and child.stdout
        reader = threading.Thread(target=_listen, args=(child.stdout, job, said), daemon=True)
        try:
            reader.start()
            with contextlib.suppress(OSError):
                # Left open: when it closes, because this process is gone, the child ends.
                child.stdin.write(json.dumps(dict(job.what)).encode() + b"\n")
                child.stdin.flush()
            while child.poll() is None:
                if time.monotonic() - job.asked > _ABANDONED:
                    return _failed("It was stopped, since nobody asked for it any more; ask again.")
                if time.monotonic() - began > _LONGEST:
                    return _failed(f"It was stopped, since it took more than {_LONGEST / 60:.0f} minutes.")
                if memory_of(child.pid) > most:
                    return _failed(_TOO_LARGE.format(most / (1 << 30)))
                reader.join(_LOOK)
                if not reader.is_alive():
                    child.wait(_ABANDONED)
            reader.join(5)
            return _outcome(child.returncode, said)
        finally:
            _kill(child)
            self._child = None
            with contextlib.suppress(OSError):
                child.stdin.close()


def _listen(out: IO[bytes], job: _Job, said: list[Any]) -> None:
    """Keep what a child knows so far, and its answer, the last line that it writes."""
    for line in out:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            told = json.loads(line)
            if told["state"] == "working":
                job.partial = told["partial"]
            else:
                said.append(told)


def _outcome(code: int, said: list[Any]) -> dict[str, Any]:
    if said and said[-1]["state"] in ("done", "failed"):
        return dict(said[-1])
    killed = (
        "was killed, most likely because the machine ran out of memory" if code in (-9, 137) else f"ended with code {code}"
    )
    return _failed(f"The process that computed it {killed}; run `nemo-fp8-debug` on a machine with more memory.")


def _failed(sentence: str) -> dict[str, Any]:
    return {"state": "failed", "error": sentence}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and what it started."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)

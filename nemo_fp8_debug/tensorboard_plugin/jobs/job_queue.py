"""Run jobs that are too large for TensorBoard's own process. Each job has its own child process, one at a time, so that the
memory is freed at the end of the job.

The child reads one request from stdin, and ends when stdin closes. It writes lines of JSON to stdout: partial results, then
the answer as the last line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import joblib

from ...analysis.formatting import make_jsonable
from ...core.text import format_number
from ...core.threads import run_in_background
from ...errors import ConfigError, RecordError, warn

#: function that receives partial results
_Tell = Callable[[Mapping[str, Any]], None]
#: environment variable with the largest memory of a job, in GiB
MEMORY = "NEMO_FP8_DEBUG_JOB_GIB"
_GIB = 1 << 30
#: default limit, as a share of the machine's memory
_SHARE = 0.5
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def read_memory_limit() -> int:
    """Return the bytes that a job may use: the limit from the environment, or half of the machine's memory."""
    given = os.environ.get(MEMORY, "")
    with contextlib.suppress(ValueError):
        if 0 < float(given) < math.inf:
            return int(float(given) * _GIB)
    if given:
        warn(f"{MEMORY} must be a number of GiB above 0, not {given[:40]!r}; the limit is half of the memory instead")
    return int(_there_is() * _SHARE)


def _there_is() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # the file may be missing, or hold "max"
        return min(machine, int(_CGROUP.read_text()))
    return machine


def measure_memory(pid: int) -> int:
    """Return the memory of a process in bytes, without mapped files. Return 0 if the system, such as macOS, reports none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssShmem:", "VmSwap:"))
    return 0


#: seconds without requests after which a job is stopped, and seconds for which we keep a failure or an outdated result
_ABANDONED, _STALE = 60.0, 30.0
#: seconds without requests after which a waiting job may be dropped, and longest time of a job in seconds
_UNASKED, _LONGEST = 5.0, 1800.0
#: largest number of finished jobs to keep, and largest number of waiting jobs
_KEPT, _WAITING = 8, 16
#: seconds between two checks of the child
_LOOK = 0.1
_TOO_LARGE = (
    "The job was stopped because it used more than {} GiB of memory. Run `nemo-fp8-debug` on the records, or start "
    f"TensorBoard with the environment variable {MEMORY} set to more."
)
# The child uses this process's sys.path, without the folder in which the child starts.
_PROGRAM = "import sys; sys.path[:] = {}; from nemo_fp8_debug.tensorboard_plugin.jobs.job_queue import main; main()"


@dataclass
class _Job:
    what: Mapping[str, Any]
    version: str
    asked: float
    began: float
    #: partial result, or None
    partial: Any = None
    answer: dict[str, Any] | None = None
    ended: float = 0.0
    delivered: bool = field(default=False)

    def is_stale(self, version: str, now: float) -> bool:
        """Return True if a delivered result is outdated, because a record has grown or the job failed a while ago."""
        if self.answer is None or not self.delivered or now - self.ended < _STALE:
            return False
        return self.version != version or self.answer["state"] == "failed"


class JobQueue:
    """A queue of jobs by request. One job runs at a time."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._is_working = False
        self._child: subprocess.Popen[bytes] | None = None
        self._running: _Job | None = None
        atexit.register(self.stop_all_jobs)

    def get_or_start_job(self, what: Mapping[str, Any], version: str) -> dict[str, Any]:
        """Return the state of a job. Add the job if it is new.

        Args:
            what: the request, in the form that `main` reads.
            version: state of all records that the job reads.

        Returns:
            `state`: `working` (with `seconds` and `partial`), `done` (with `result`) or `failed` (with `error`).
        """
        key, now = json.dumps(what, sort_keys=True), time.monotonic()
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_stale(version, now):
                self._forget()
                self._make_room(now)
                if sum(held.answer is None for held in self._jobs.values()) >= _WAITING:
                    return {"state": "failed", "error": "Too many jobs are waiting; try again in a minute."}
                job = self._jobs[key] = _Job(what, version, now, now)
            job.asked = now
            if job.answer is None:
                self._work()
                return {"state": "working", "seconds": round(now - job.began, 1), "partial": job.partial}
            job.delivered = True
            return job.answer

    def stop_all_jobs(self) -> None:
        """Stop the running job and drop all others."""
        with self._lock:
            self._jobs.clear()
        if self._child is not None:
            _kill(self._child)

    def _forget(self) -> None:
        """Drop old results to make room for one more."""
        finished = sorted((key for key, job in self._jobs.items() if job.answer), key=lambda key: self._jobs[key].asked)
        for key in finished[: max(0, len(finished) - _KEPT + 1)]:
            del self._jobs[key]

    def _make_room(self, now: float) -> None:
        """If too many jobs wait, drop those without recent requests."""
        waiting = [key for key, job in self._jobs.items() if job.answer is None and job is not self._running]
        if len(waiting) >= _WAITING - 1:
            for key in waiting:
                if now - self._jobs[key].asked > _UNASKED:
                    del self._jobs[key]

    def _work(self) -> None:
        if not self._is_working:
            self._is_working = True
            run_in_background("fp8-jobs", self._run)

    def _run(self) -> None:
        while job := self._next():
            try:
                answer = self._done(job)
            except Exception as error:
                answer = _failed(f"The job failed ({type(error).__name__}: {error}).")
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
                self._is_working = False
            self._running = next(iter(waiting.values()), None)
            return self._running

    def _done(self, job: _Job) -> dict[str, Any]:
        """Run a job in a child process and return its answer. Stop the job if no page asks for it, or if it takes too long
        or too much memory.
        """
        began, most = time.monotonic(), read_memory_limit()
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
        assert child.stdin and child.stdout
        said = run_in_background("fp8-job-output", partial(_listen, child.stdout, job))
        try:
            with contextlib.suppress(OSError):
                # stdin stays open, so that the child ends when this process is gone.
                child.stdin.write(json.dumps(dict(job.what)).encode() + b"\n")
                child.stdin.flush()
            while child.poll() is None:
                if time.monotonic() - job.asked > _ABANDONED:
                    return _failed("The job was stopped because no page asked for its result; ask again.")
                if time.monotonic() - began > _LONGEST:
                    return _failed(f"The job was stopped because it took more than {_LONGEST / 60:.0f} minutes.")
                if measure_memory(child.pid) > most:
                    return _failed(_TOO_LARGE.format(format_number(most / (1 << 30))))
                if wait([said], _LOOK).done:
                    child.wait(_ABANDONED)
            wait([said], 5)
            return _outcome(child.returncode, said.result() if said.done() else None)
        finally:
            _kill(child)
            self._child = None
            with contextlib.suppress(OSError):
                child.stdin.close()


def _listen(out: IO[bytes], job: _Job) -> Any:
    """Store a child's partial results. Return its last line, which is the answer, or None."""
    said = None
    for line in out:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            told = json.loads(line)
            if told["state"] == "working":
                job.partial = told["partial"]
            else:
                said = told
    return said


def _outcome(code: int, said: Any) -> dict[str, Any]:
    if said and said["state"] in ("done", "failed"):
        return dict(said)
    killed = (
        "was killed, most likely because the machine ran out of memory" if code in (-9, 137) else f"ended with code {code}"
    )
    return _failed(f"The job's process {killed}; run `nemo-fp8-debug` on a machine with more memory.")


def _failed(sentence: str) -> dict[str, Any]:
    return {"state": "failed", "error": sentence}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and the processes that it started."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


#: niceness of the child, so that TensorBoard and other processes take precedence
_NICE = 5


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    run_in_background("fp8-parent", _end_with_the_parent)
    os.nice(_NICE)
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to stderr
    with os.fdopen(out, "w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()

        write(answer_request(request, lambda partial: write({"state": "working", "partial": make_jsonable(partial)})))


def answer_request(request: dict[str, Any], tell: _Tell = lambda partial: None) -> dict[str, Any]:
    """Return the answer to a request, in the form for the browser.

    Args:
        tell: function that receives partial results.
    """
    try:
        # Use one process, because starting more would take longer than the work, and a job may use only one.
        with joblib.parallel_config("sequential"):
            return {"state": "done", "result": make_jsonable(_compute(request.pop("kind"), request, tell))}
    except (ConfigError, RecordError) as error:
        return _failed(str(error))
    except MemoryError:
        return _failed("The job needs more memory than there is; run `nemo-fp8-debug` on a larger machine.")
    except Exception as error:  # for example a damaged record that passed all checks
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return _failed(f"The job failed ({told}).")


def _compute(kind: str, request: dict[str, Any], tell: _Tell) -> Any:
    """Compute the result of a request."""
    # Imported only now, because the import takes as long as some jobs.
    from .analyses import compare_and_diagnose_run, compute_metrics_under_recipe, diagnose_headline_only

    if kind == "verdict":
        return compare_and_diagnose_run(**request, tell=tell)
    if kind == "headline":
        del request["version"]  # the version only distinguishes jobs on different states of a record
        return diagnose_headline_only(**request)
    return compute_metrics_under_recipe(**request)


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # sys.stdin could not be closed at exit during a read
        pass
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # also ends the processes that this process started
    os._exit(1)

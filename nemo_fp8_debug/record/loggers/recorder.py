"""Send summaries to loggers. Each logger has its own thread, so that training never waits."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ...core.sample import Recorder, Sample
from ...core.threads import WorkerThread
from ...errors import warn
from ..scalars import LayerMap, SampleSummarizer, ScalarRecorder
from .sinks import PREFIX, LoggerSink

#: number of sampled steps between two maps of the layers; the last map is always sent
MAP_INTERVAL = 20
#: longest time in seconds that the end of a run waits for all loggers together
CLOSING = 120.0
#: scalars of each step that we log only in runs that we started
_OF_STEPS = ("loss", "grad_norm", "lr", "loss_scale")
#: calls that may wait for a slow logger; later calls are dropped
WAITING = 200
#: seconds after which we assume that a call hangs; the end of a run does not wait for calls that hang
HANGING = 120.0
#: longest time in seconds to make the comparison page
PAGE_LIMIT = 90.0


class LoggerRecorder(Recorder):
    """Sends a summary of each sample to all loggers. The summary is computed once, in the background.

    When the record is complete, `finish_runs` sends the last map and the comparison page.
    """

    def __init__(
        self, sinks: Sequence[LoggerSink], page: ComparisonPage, every_tensor: Callable[[], ScalarRecorder] | None = None
    ) -> None:
        """
        Args:
            page: the comparison page, which is attached at the end of the run.
            every_tensor: function that makes a recorder for scalars of single tensors. None: loggers get no such scalars.
        """
        self._threads = [LoggerThread(sink) for sink in sinks]
        self._overview = SampleSummarizer()
        self._every_tensor = every_tensor() if every_tensor else None
        self._page = page
        self._samples = 0
        self._map: LayerMap | None = None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start or join the run of each logger."""
        self._overview.read_observed_share(fingerprint)
        for thread in self._threads:
            thread.queue_job(lambda sink: sink.open(fingerprint), needed=True)

    def record(self, sample: Sample) -> None:
        """Send one sampled step."""
        found = self._overview.summarize_sample(sample)
        scalars = found.scalars | (self._every_tensor.collect_tags(sample).values if self._every_tensor else {})
        rows = {sample.step: _named(scalars)}
        texts = {PREFIX + name: text for name, text in found.texts.items()}
        self._each(lambda sink: sink.log_scalars(rows))
        self._each(lambda sink: sink.store_texts(texts))
        self._map = LayerMap.from_sample(sample)
        if self._samples % MAP_INTERVAL == 0:
            self._show_map()
        self._samples += 1

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Send losses to runs that we started. In other runs the framework logs them."""
        known = {step: {name: of[name] for name in _OF_STEPS if name in of} for step, of in steps.items()}
        if rows := {step: _named(of) for step, of in known.items() if of}:
            self._each(lambda sink: sink.log_scalars(rows) if sink.owned else None)

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Send the losses of an evaluation to runs that we started."""
        rows = {step: _named(losses)}
        self._each(lambda sink: sink.log_scalars(rows) if sink.owned else None)

    def finish_runs(self, failed: bool) -> None:
        """Show the last map, attach the page, end the runs that we started, and wait for up to `CLOSING` seconds.

        Args:
            failed: whether the run failed.
        """
        self._show_map()
        self._each(self._attach, last=True)
        self._each(lambda sink: sink.close(failed), last=True)
        deadline = time.monotonic() + CLOSING
        for thread in self._threads:
            thread.await_jobs(deadline)

    def _attach(self, sink: LoggerSink) -> None:
        if page := self._page.make_page_file():
            sink.attach_file(page)

    def _show_map(self) -> None:
        shown, self._map = self._map, None
        if shown:
            self._each(lambda sink: sink.log_layer_map(shown))

    def _each(self, job: Callable[[LoggerSink], None], last: bool = False) -> None:
        for thread in self._threads:
            thread.queue_job(job, last=last)


def _named(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite scalars under the names that loggers use."""
    known = {name: float(value) for name, value in scalars.items() if value is not None and math.isfinite(value)}
    return {name if name.startswith("fp8") else PREFIX + name: value for name, value in known.items()}


class LoggerThread:
    """Does a sink's jobs in order. Errors do not affect the run. We warn once for each type of error."""

    def __init__(self, sink: LoggerSink) -> None:
        self.sink = sink
        self._worker = WorkerThread(f"nemo_fp8_debug {sink.name}")
        self._waiting: deque[Future[None]] = deque()
        self._began = 0.0
        self._usable = True
        self._dropped = 0
        self._warned: set[type] = set()

    def queue_job(self, job: Callable[[LoggerSink], None], needed: bool = False, last: bool = False) -> None:
        """Queue `job` to run after all earlier jobs, without waiting for it.

        Args:
            needed: whether later jobs depend on this job, such as opening the run. If it fails, they are dropped.
            last: whether the job belongs to the end of the run and must not be dropped.
        """
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) >= WAITING and not last:
            if not self._dropped:
                warn(f"{self.sink.name} hangs or does not keep up. Further calls to it are dropped, and the run goes on")
            self._dropped += 1
            return
        self._waiting.append(self._worker.submit(lambda: self._do(job, needed)))

    def _do(self, job: Callable[[LoggerSink], None], needed: bool) -> None:
        if not self._usable:
            return
        self._began = time.monotonic()
        try:
            job(self.sink)
        except BaseException as error:
            self._usable = not needed
            if type(error) not in self._warned:
                self._warned.add(type(error))
                lost = "it receives no data of this run" if needed else "data it received is lost"
                warn(f"the logger {self.sink.name} failed, and {lost}: {type(error).__name__}: {error}")

    @property
    def _hangs(self) -> bool:
        return self._began > 0 and time.monotonic() - self._began > HANGING

    def await_jobs(self, deadline: float) -> None:
        """Wait until all jobs are done, at most until `deadline` (by `time.monotonic`). Do not wait for a call that
        hangs.
        """
        pending = [future for future in self._waiting if not future.done()]
        while pending and time.monotonic() < deadline and not self._hangs:
            wait(pending, max(0.0, min(1.0, deadline - time.monotonic())))
            pending = [future for future in pending if not future.done()]
        if pending:
            warn(f"the logger {self.sink.name} hangs or is slow. We drop {len(pending)} calls to it")
        self._worker.close(0.0 if pending else 1.0)


class ComparisonPage:
    """The page that compares the run with its baseline. `nemo-fp8-debug` makes the page in a separate process.

    The page is made once for all loggers, at the first request.
    """

    def __init__(self, baseline: str | None, run: str | None) -> None:
        """
        Args:
            baseline: the baseline's record, or None for no page.
            run: this run's record, or None for no page.
        """
        self._records = (baseline, run) if baseline and run else None
        self._lock = threading.Lock()
        self._made: Path | None = None
        self._tried = False

    def make_page_file(self) -> Path | None:
        """Return the page's file. If the page cannot be made, warn with the reason and return None."""
        with self._lock:
            if self._records and not self._tried:
                self._tried, self._made = True, _made(*map(str, self._records))
            return self._made


def _made(baseline: str, run: str) -> Path | None:
    page = Path(tempfile.mkdtemp(prefix="nemo_fp8_debug_")) / "fp8_compared_with_baseline.html"
    command = [sys.executable, "-c", "from nemo_fp8_debug.cli import app; app()", "compare", run, "--baseline", baseline]
    try:
        done = subprocess.run(
            [*command, "--html", str(page)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=PAGE_LIMIT,
        )
        if page.is_file():
            return page
        why = (done.stderr.strip().splitlines() or ["no page was written"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    warn(f"loggers get no page that compares the run with {baseline}: {why}")
    return None

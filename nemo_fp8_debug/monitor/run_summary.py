"""Print two lines for a run: at the start, the folder of its record, and at the end, the record's content."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ..core.coverage_text import describe_unobserved
from ..core.sample import Recorder
from ..core.waits import WaitTimes
from ..options.config import Config
from ..record.console_table import print_safely
from ..record.tensorboard import TensorBoardRecorder
from ..record.writer import RunRecordWriter


class RunSummaryPrinter:
    """Prints the first and the last line of a run to the same output as the tables. `table_rows=0` turns off both lines."""

    def __init__(
        self, config: Config, recorders: Sequence[Recorder], gemms: int, coverage: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            recorders: recorders of this rank. If none of them is a run record, nothing is printed.
            gemms: number of sampled GEMMs.
            coverage: the fingerprint's section about coverage.
        """
        self._config, self._gemms, self._coverage = config, gemms, coverage
        self._record = next((r for r in recorders if isinstance(r, RunRecordWriter)), None) if config.table_rows else None
        events = (r.folder for r in recorders if isinstance(r, TensorBoardRecorder) and r.folder)
        self._events = next(events, None)
        #: number of sampled steps that ended
        self.due = 0

    def print_first_line(self) -> None:
        """Print the first line."""
        if record := self._record:
            attempt = f" (attempt {record.attempt}: earlier attempts are kept)" if record.attempt else ""
            self._show(f"recording {self._gemms} GEMMs, {self._config.describe_schedule()}, to {record.storage}{attempt}")
            if text := describe_unobserved(self._coverage):
                self._show(text)

    def print_line(self, text: str) -> None:
        """Print a line during the run."""
        if self._record:
            self._show(text)

    def print_last_line(self, over: bool, stuck: bool, waits: WaitTimes) -> None:
        """Print the last line.

        Args:
            over: whether sampling ended before the run because ranks were out of sync.
            stuck: whether a write hangs.
            waits: waiting times of the training thread.
        """
        if not (record := self._record):
            return
        found = f"recorded {record.samples} samples"
        if record.samples < self.due:
            found = f"recorded only {record.samples} of {self.due} samples (warnings say why)"
        notes = [
            f"{record.lost} parts of the record could not be written" if record.lost else "",
            "sampling ended before the run did" if over else "",
            "a write to the record hangs" if stuck else "",
            waits.describe_waits(self.due),
        ]
        what = "; ".join([f"{found} in {record.storage}", *filter(None, notes)])
        view = f"View: tensorboard --logdir {self._logdir()} or nemo-fp8-debug diagnose {shlex.quote(str(record.storage))}"
        self._show(f"{what}. {view}" if record.samples else f"{what}.")

    def _logdir(self) -> str:
        """Return the parent folder of the record if it contains the events, so that TensorBoard finds both."""
        assert self._record
        place = str(self._record.storage)
        return shlex.quote(self._events if self._events and PurePath(place).is_relative_to(self._events) else place)

    def _show(self, text: str) -> None:
        with contextlib.suppress(Exception):  # standard output may be closed, which must not affect the run
            print_safely(f"nemo_fp8_debug: {text}")

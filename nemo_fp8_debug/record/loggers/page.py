"""The page that compares a run with its baseline, made by the command in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from ...errors import warn

#: seconds that it may take
LIMIT = 90.0


class ComparisonPage:
    """Made once, for all loggers, when the first one asks for it."""

    def __init__(self, baseline: str | None, run: str | None) -> None:
        """
        Args:
            baseline: its record; None: there is no page.
            run: the record of this run; None: there is no page.
        """
        self._records = (baseline, run) if baseline and run else None
        self._lock = threading.Lock()
        self._made: Path | None = None
        self._tried = False

    def path(self) -> Path | None:
        """The file; None if there is none, of which a warning has said why."""
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
            timeout=LIMIT,
        )
        if page.is_file():
            return page
        why = (done.stderr.strip().splitlines() or ["no page was written"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    warn(f"loggers get no page that compares the run with {baseline}: {why}")
    return None

"""Compacts each of some records in a process that is killed at a random moment: `killed_compaction.py LARGEST RUN...`.

The first one is not killed, and tells how long it takes. Prints how many of the others were killed before they were done.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.compaction import compact


def main() -> None:
    merging.LARGEST = int(sys.argv[1])
    whole, *others = sys.argv[2:]
    began = time.monotonic()
    assert killed_after(None, whole) == 0
    took, draws = time.monotonic() - began, random.Random(0)
    print(sum(killed_after(draws.uniform(0, took), run) == signal.SIGKILL for run in others))


def killed_after(seconds: float | None, run: str) -> int:
    """The status of a process that compacts a run."""
    if not (process := os.fork()):
        compact(run, killed=True)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


if __name__ == "__main__":
    main()

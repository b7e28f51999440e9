"""Compacts each of some records in a process that is killed at a random moment: `killed_compaction.py LARGEST RUN...`.

The first one is not killed, and tells how many calls of the operating system (files opened, renamed, removed) there are.
Each other one is killed up to a millisecond after one of them, drawn from all but the last: moments are counted and not
timed, so that a busy machine changes nothing. Prints how many were killed before they were done.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from nemo_fp8_debug.record import merging
from nemo_fp8_debug.record.merging import compact_record

CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir")


def main() -> None:
    merging.LARGEST = int(sys.argv[1])
    whole, *others = sys.argv[2:]
    counted = Path(f"{whole}.calls")
    assert compacted(whole, counted=counted) == 0
    draws, calls = random.Random(0), int(counted.read_text())
    print(sum(compacted(run, killed_at=draws.randrange(1, calls)) == signal.SIGALRM for run in others))


def compacted(run: str, *, killed_at: int = 0, counted: Path | None = None) -> int:
    """The status of a process that compacts a run, and is killed just after such a call, or writes how many there were."""
    if not (process := os.fork()):
        calls = 0

        def heard(event: str, _: object) -> None:
            nonlocal calls
            if event in CALLS:
                calls += 1
                if calls == killed_at:  # by a signal that no Python code handles
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))

        sys.addaudithook(heard)
        compact_record(run, killed=True)
        if counted:
            counted.write_text(str(calls))
        os._exit(0)
    return os.waitpid(process, 0)[1]


if __name__ == "__main__":
    main()

"""How much memory a job may take, and how much it does take."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from ...errors import warn

#: environment variable: GiB that a job may take
MEMORY = "NEMO_FP8_DEBUG_JOB_GIB"
_GIB = 1 << 30
#: of the machine's memory, unless that is set
_SHARE = 0.5
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def budget() -> int:
    """Bytes that a job may take: what the environment says, or half of the memory that the machine or container has."""
    given = os.environ.get(MEMORY, "")
    with contextlib.suppress(ValueError):
        if 0 < float(given) < math.inf:
            return int(float(given) * _GIB)
    if given:
        warn(f"{MEMORY} is {given[:40]!r}; it takes a number of GiB above 0, and half of the memory is the limit")
    return int(_there_is() * _SHARE)


def _there_is() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not every machine has one, and it may hold "max"
        return min(machine, int(_CGROUP.read_text()))
    return machine


def memory_of(pid: int) -> int:
    """Bytes of a process that no file holds as well; 0 if the system does not tell, as on macOS."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssShmem:", "VmSwap:"))
    return 0

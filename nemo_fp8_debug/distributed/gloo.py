"""Gloo among some of the ranks, apart from the process groups that torch.distributed knows of.

Those may be named by how many of them a rank has: one of ours on some ranks only would part the run's own, and ranks with
different numbers of them, as stages of a pipeline are, would not meet in ours. A run that ends its own leaves this one.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .networks import list_interfaces


class Group:
    """Between host memories. What takes longer than the timeout, or meets a rank that is gone, raises.

    Ranks connect with those that they talk to and no others, where torch can do so. Collectives go round a ring: a rank has
    two neighbors however many ranks there are, and does not run out of file descriptors, which would hit the run.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Get ready to meet the others; called on all `ranks`.

        Args:
            store: what only these ranks use, and for this.
            ranks: global ranks, ascending.
            seconds: that one rank waits for another.

        Raises:
            RuntimeError: gloo cannot be used here, or the others do not come.
        """
        self._ranks, self._first = list(ranks), rank == ranks[0]
        self._seconds = seconds
        #: gloo waits for other ranks, perhaps for longer than anybody here does, or has failed
        self._pending = False
        options = _options(timedelta(seconds=seconds))
        self._gloo: Any = dist.ProcessGroupGloo(store, self._ranks.index(rank), len(ranks), *options)

    def maximum(self, x: torch.Tensor) -> None:
        """The largest of each element over all ranks, in place."""
        self._reduce(x, dist.ReduceOp.MAX)

    def add_up(self, x: torch.Tensor, seconds: float | None = None) -> None:
        """The sum of each element over all ranks, in place.

        Args:
            seconds: to wait at the most; those of the group unless told.
        """
        self._reduce(x, dist.ReduceOp.SUM, seconds)

    def _reduce(self, x: torch.Tensor, operation: Any, seconds: float | None = None) -> None:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self._do(lambda: self._gloo.allreduce([x], options), seconds)

    def _do(self, begin: Callable[[], Any], seconds: float | None = None) -> None:
        """Wait in Python: a thread that comes back from C++ while the interpreter ends would end the process with an error.

        Gloo's own timeout, which says more, does not hold while it looks for a rank in the store.
        """
        began, limit = time.monotonic(), self._seconds + 1.0 if seconds is None else seconds
        self._pending = True
        work = begin()
        while not work.is_completed():
            if (waited := time.monotonic() - began) > limit:
                raise TimeoutError("Timed out waiting for other ranks")
            time.sleep(pause_after(waited))
        work.wait()
        self._pending = False

    def gather(self, value: Any) -> list[Any] | None:
        """What each rank brings, on the first one; None on others."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = torch.tensor([len(data)])
        self.maximum(longest)
        padded = torch.zeros(int(longest), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [[torch.empty_like(padded) for _ in self._ranks]] if self._first else []
        options: Any = dist.GatherOptions()
        options.rootRank = 0
        self._do(lambda: self._gloo.gather(parts, [padded], options))
        return [pickle.loads(part.numpy().tobytes()) for part in parts[0]] if parts else None

    def close(self, in_sync: bool) -> None:
        """Part.

        Args:
            in_sync: all ranks have done the same. Otherwise gloo is left alone: to end it would wait for what is under way,
                and after a failure the thread of its connections may never end.
        """
        if (self._pending or not in_sync) and self._gloo is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))  # not even the end of the interpreter ends it
        self._gloo = None


def pause_after(waited: float) -> float:
    """Seconds until a rank looks again, so that it waits for a quarter longer than it has to at the most."""
    return min(max(waited / 4, 1e-5), 2e-3)


def _options(timeout: timedelta) -> tuple[Any]:
    """How a process group is told to connect when it must; its timeout alone, where torch knows no such thing."""
    try:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
    except (AttributeError, TypeError):  # which torch then reads the names of interfaces with, too
        return (timeout,)
    return (options,)


def _devices() -> list[Any]:
    """The network interfaces that torch would take by itself, which it does for groups with a timeout alone."""
    gloo: Any = dist.ProcessGroupGloo
    if named := list_interfaces():
        return [gloo.create_device(interface=name, lazy_init=True) for name in named]
    return [gloo.create_default_device(lazy_init=True)]

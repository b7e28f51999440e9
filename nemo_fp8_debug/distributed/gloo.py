"""Gloo groups of some ranks, separate from the process groups of torch.distributed.

torch may name a new group by the number of groups that the rank has made. If we made a torch group on some ranks only, these
numbers would differ between ranks, and the run's own groups could not connect. Ranks that have made different numbers of
groups, such as pipeline stages, could not connect in our group either. A gloo group has neither problem. It also survives if
the run destroys its process groups.
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

from .networks import list_gloo_interfaces


class GlooGroup:
    """A group that exchanges data in host memory. A call raises an error if it exceeds the timeout or a rank is gone.

    If torch supports it, a rank connects only with ranks that it exchanges data with. Collectives pass data around a ring,
    so each rank connects with two neighbors. So we never use up the process's file descriptors, which the run needs too.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Prepare the connection with the other ranks. All `ranks` call this.

        Args:
            store: a store that only these ranks use, and only for this group.
            ranks: global ranks, ascending.
            seconds: longest time that one rank waits for another.

        Raises:
            RuntimeError: gloo cannot be used here, or other ranks do not arrive.
        """
        self._ranks, self._first = list(ranks), rank == ranks[0]
        self._seconds = seconds
        #: whether gloo may still wait for other ranks, or has failed
        self._pending = False
        options = _options(timedelta(seconds=seconds))
        self._gloo: Any = dist.ProcessGroupGloo(store, self._ranks.index(rank), len(ranks), *options)

    def reduce_maximum(self, x: torch.Tensor) -> None:
        """Compute the maximum of each element over all ranks, in place."""
        self._reduce(x, dist.ReduceOp.MAX)

    def reduce_sum(self, x: torch.Tensor, seconds: float | None = None) -> None:
        """Compute the sum of each element over all ranks, in place.

        Args:
            seconds: longest wait, or None for the group's default.
        """
        self._reduce(x, dist.ReduceOp.SUM, seconds)

    def _reduce(self, x: torch.Tensor, operation: Any, seconds: float | None = None) -> None:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self._do(lambda: self._gloo.allreduce([x], options), seconds)

    def _do(self, begin: Callable[[], Any], seconds: float | None = None) -> None:
        """Run a collective and wait for it in Python.

        If a thread returns from C++ while the interpreter ends, the process ends with an error. Gloo's own timeout has a
        better message, but does not apply while gloo looks up a rank in the store.
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

    def gather_to_first_rank(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on the first rank, and None on others."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = torch.tensor([len(data)])
        self.reduce_maximum(longest)
        padded = torch.zeros(int(longest), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [[torch.empty_like(padded) for _ in self._ranks]] if self._first else []
        options: Any = dist.GatherOptions()
        options.rootRank = 0
        self._do(lambda: self._gloo.gather(parts, [padded], options))
        return [pickle.loads(part.numpy().tobytes()) for part in parts[0]] if parts else None

    def close(self, in_sync: bool) -> None:
        """Leave the group.

        Args:
            in_sync: whether all ranks leave the group. Otherwise we leave the gloo group open. Closing the group
                waits for running calls, and after a failure gloo's connection thread may never end.
        """
        if (self._pending or not in_sync) and self._gloo is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))  # keep gloo alive even when the interpreter ends
        self._gloo = None


def pause_after(waited: float) -> float:
    """Return the seconds until a waiting rank checks again. So a rank waits at most a quarter longer than necessary."""
    return min(max(waited / 4, 1e-5), 2e-3)


def _options(timeout: timedelta) -> tuple[Any]:
    """Return options with which a process group connects on demand. For older versions of torch, return the timeout only."""
    try:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
    except (AttributeError, TypeError):  # this version of torch chooses the interfaces itself
        return (timeout,)
    return (options,)


def _devices() -> list[Any]:
    """Return the network interfaces that torch would choose. If we pass options, torch does not choose."""
    gloo: Any = dist.ProcessGroupGloo
    if named := list_gloo_interfaces():
        return [gloo.create_device(interface=name, lazy_init=True) for name in named]
    return [gloo.create_default_device(lazy_init=True)]

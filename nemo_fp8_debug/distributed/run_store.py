"""Query the store of torch.distributed with a time limit.

Most calls of a TCPStore have no timeout. If the store's host is frozen or cut off, a call waits forever and keeps the lock
of its connection. So queries run in a separate thread, and over a separate connection if torch can make one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from ..core.threads import WorkerThread

T = TypeVar("T")
_TCPStore: Any = getattr(dist, "TCPStore", None)
#: number of file descriptors that the store's host needs in addition to two connections for each rank
DESCRIPTORS = 256


class RunStore:
    """Asks the default store of torch.distributed while its process group exists."""

    def __init__(self) -> None:
        # Do not keep the run's store alive, because the run's next store could not use its port and connections.
        there = dist.is_available() and dist.is_initialized()
        self._met = weakref.ref(dist.group.WORLD) if there else lambda: None
        self._worker: WorkerThread | None = None
        self._clone: Any = None
        self._socket: socket.socket | None = None
        self._unanswered: Future[Any] | None = None

    def call_with_timeout(self, question: Callable[[Any], T], seconds: float) -> T:
        """Return the result of `question(store)`, or raise its error.

        If the store did not answer in time, further questions fail at once until it does.

        Raises:
            TimeoutError: the store does not answer.
            RuntimeError: the process group is gone.
        """
        if self._met() is not dist.group.WORLD:
            self.close()
            raise RuntimeError("the process group in which the ranks met is gone")
        if silence := self.describe_unresponsive_store():
            raise TimeoutError(silence)
        self._worker = self._worker or WorkerThread("nemo_fp8_debug store")
        answer: Future[T] = self._worker.submit(lambda: question(self._connection()))
        if not wait([answer], seconds).done:
            self._unanswered = answer
            raise TimeoutError(self.describe_unresponsive_store() or f"the store answered after more than {seconds:.0f} s")
        return answer.result()

    def describe_unresponsive_store(self) -> str | None:
        """Return a message if the store still has not answered an earlier question, otherwise None."""
        if self._unanswered is None or self._unanswered.done():
            return None
        return f"the store that the ranks met at{_address()} does not answer"

    def close(self) -> None:
        """Stop asking, and end a call that still waits for an answer.

        Otherwise the call might return while the interpreter ends, and the process would end with an error.
        """
        if self._socket and self.describe_unresponsive_store():
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._worker:
            self._worker.close(1.0)
        self._worker = self._clone = self._socket = None

    def _connection(self) -> Any:
        store: Any = dist.distributed_c10d._get_default_store()
        if self._clone is None and _can_be_cloned(store):
            port = _inner(store).port
            before = set(_sockets_to(port))
            self._clone = store.clone()
            if len(made := set(_sockets_to(port)) - before) == 1:
                self._socket = socket.socket(fileno=os.dup(made.pop()))
        return store if self._clone is None else self._clone

    def address(self) -> tuple[str, int] | None:
        """Return the store's host and port as this rank sees them, or None if the store is not a TCPStore."""
        inner = _inner(dist.distributed_c10d._get_default_store())
        return (inner.host, inner.port) if isinstance(inner, _TCPStore) else None


def _sockets_to(port: int) -> Iterator[int]:
    """Yield file descriptors of this process that are connected to a port, here or on another host."""
    for fd in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as seen:
                if seen.getpeername()[1:2] == (port,):
                    yield fd


def _inner(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)


def _can_be_cloned(store: Any) -> bool:
    """Return whether the store's host has enough file descriptors for one more connection from each rank."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fits = room == resource.RLIM_INFINITY or 2 * dist.get_world_size() + DESCRIPTORS <= room
    return fits and hasattr(store, "clone") and isinstance(_inner(store), _TCPStore)


def _address() -> str:
    try:
        inner = _inner(dist.distributed_c10d._get_default_store())
        return f" ({inner.host}:{inner.port})" if isinstance(inner, _TCPStore) else ""
    except Exception:  # the run has destroyed its process group meanwhile
        return ""

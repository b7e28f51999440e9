"""The store that the ranks of a run met at, asked such that nobody waits longer than agreed.

Most calls of a TCPStore have no timeout: they wait for ever if its host is frozen or cut off, and keep the lock of their
connection meanwhile. So every question is asked in a thread of its own, and on a connection of its own if torch can make it.
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

from ..core.threads import Worker

T = TypeVar("T")
_TCPStore: Any = getattr(dist, "TCPStore", None)
#: file descriptors that the process that hosts the store needs beside two connections a rank
DESCRIPTORS = 256


class RunStore:
    """Asks the default store of torch.distributed, as long as the process group that it belongs to is there."""

    def __init__(self) -> None:
        # Kept alive by us, the run's store would keep its port and its connections from the run's next one.
        there = dist.is_available() and dist.is_initialized()
        self._met = weakref.ref(dist.group.WORLD) if there else lambda: None
        self._worker: Worker | None = None
        self._clone: Any = None
        self._socket: socket.socket | None = None
        self._unanswered: Future[Any] | None = None

    def ask(self, question: Callable[[Any], T], seconds: float) -> T:
        """What `question(store)` returns or raises.

        Once the store has not answered in time, further questions fail at once until it does.

        Raises:
            TimeoutError: the store does not answer.
            RuntimeError: the process group is gone.
        """
        if self._met() is not dist.group.WORLD:
            self.close()
            raise RuntimeError("the process group in which the ranks met is gone")
        if silence := self.silence():
            raise TimeoutError(silence)
        self._worker = self._worker or Worker("nemo_fp8_debug store")
        answer: Future[T] = self._worker.submit(lambda: question(self._connection()))
        if not wait([answer], seconds).done:
            self._unanswered = answer
            raise TimeoutError(self.silence() or f"the store answered after more than {seconds:.0f} s")
        return answer.result()

    def silence(self) -> str | None:
        """In words, that the store has not answered an earlier question, and still does not; None: it has answered all."""
        if self._unanswered is None or self._unanswered.done():
            return None
        return f"the store that the ranks met at{_address()} does not answer"

    def close(self) -> None:
        """Ask no longer, and end the call that waits for an answer, if there is one.

        A thread that came back from it while the interpreter ends would end the process with an error.
        """
        if self._socket and self.silence():
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
        """Host and port, as this rank has them; None: it is no TCPStore."""
        inner = _inner(dist.distributed_c10d._get_default_store())
        return (inner.host, inner.port) if isinstance(inner, _TCPStore) else None


def _sockets_to(port: int) -> Iterator[int]:
    """File descriptors of this process that are connected to a port of another one, or its own."""
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
    """A connection more from each rank must not keep the host of the store from opening files."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fits = room == resource.RLIM_INFINITY or 2 * dist.get_world_size() + DESCRIPTORS <= room
    return fits and hasattr(store, "clone") and isinstance(_inner(store), _TCPStore)


def _address() -> str:
    try:
        inner = _inner(dist.distributed_c10d._get_default_store())
        return f" ({inner.host}:{inner.port})" if isinstance(inner, _TCPStore) else ""
    except Exception:  # the run has ended its process group meanwhile
        return ""

"""What holds for every example: it ends in time, in memory, and within its folder."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: seconds of processor time, and bytes by which the process may have grown at its largest
SECONDS, BYTES = 10, 1 << 30
#: characters of an error's message
MESSAGE = 2000
#: what changes files, by the name of the audit event, and which of its arguments are paths
_CHANGES = {"os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.truncate": 1}
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Finding(AssertionError):
    """An example that broke a promise."""


class Hang(BaseException):
    """An example that did not end in time; nothing catches it on the way."""


class _Watch:
    """Which changes were made outside of a folder; audit hooks are never removed, so that there is one for all."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self._thread = threading.get_ident()
        self.seen: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, given: tuple[Any, ...]) -> None:
        if self.folder is None or threading.get_ident() != self._thread:
            return
        paths: tuple[Any, ...] = ()
        if event == "open" and isinstance(given[2], int) and given[2] & _WRITES:
            paths = given[:1]
        elif event in _CHANGES:
            paths = given[: _CHANGES[event]]
        elif event in _STARTS:
            self.seen.append(f"{event} {given[0]!r}")
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)) and not self._is_inside(os.fsdecode(path)):
                self.seen.append(f"{event} {path!r}")

    def _is_inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return path == os.devnull or real.startswith(f"{self.folder}/") or real == self.folder or "__pycache__" in real


_watch: list[_Watch] = []


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[None]:
    """Run an example within all limits.

    Raises:
        Finding: it broke one.
    """
    if not _watch:
        _watch.append(_Watch())
    (watch,) = _watch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.folder, watch.seen = os.path.realpath(folder), []
    earlier = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except Hang:
        raise Finding(f"did not end within {SECONDS} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
        watch.folder = None
    if watch.seen:
        raise Finding(f"went outside of its folder: {'; '.join(watch.seen[:3])}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > BYTES:
        raise Finding(f"took {grown >> 20} MiB")


def _too_long(*_: Any) -> None:
    raise Hang


def expect(*errors: type[Exception]) -> _Expected:
    """A context in which errors of these classes are fine, if their message is a short line.

    Raises:
        Finding: another error was raised, or a message that people cannot use.
    """
    return _Expected(errors)


class _Expected:
    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        self._errors = errors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception) or isinstance(error, Finding):
            return False
        if not isinstance(error, self._errors):
            raise Finding(f"raised {type(error).__name__}: {str(error)[:MESSAGE]}") from error
        text = str(error)
        if not text or "\n" in text or len(text) > MESSAGE:
            raise Finding(f"raised {type(error).__name__} with {len(text)} characters, or lines: {text[:MESSAGE]!r}")
        return True

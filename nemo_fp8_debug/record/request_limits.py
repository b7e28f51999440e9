"""What a run lets a remote place cost: each request has a time limit, and after a failure the place is left alone a while.

Drivers repeat what fails, in layers: s3fs 5 times what botocore does 5 times. A silent place would keep a write, and all
that waits behind it, for 25 times the 15 s that it waits for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Iterator
from typing import Any

from fsspec.asyn import sync

#: seconds that a request may take, with all that its driver does to repeat it
LIMIT = 20.0
#: bytes a second that any upload has
SLOWEST = 1 << 20
#: times as long as a failed request took, no other one is made: so failures take about a tenth of the time
REST = 9
#: seconds; what fails sooner costs little, and is not left alone
_QUICK = 1.0


class RequestLimits:
    """Makes the requests of one run to one place."""

    def __init__(self) -> None:
        self._asked_again = 0.0  # when, by the monotonic clock
        self._why = ""

    def end_rest(self) -> None:
        """Let the next request be made, whenever the last one failed."""
        self._asked_again = 0.0

    def call(self, fs: Any, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call a method of a file system.

        Args:
            fs: an fsspec file system. One that is not asynchronous, as sftp, has no time limit.
            size: bytes that are sent.

        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the place is left alone, since it did not answer lately.
            Exception: what the driver raises.

        Example:
            >>> import fsspec
            >>> limits, fs = RequestLimits(), fsspec.filesystem("memory")
            >>> limits.call(fs, "pipe_file", "/limits/example", b"content", size=7)
            >>> limits.call(fs, "cat_file", "/limits/example")
            b'content'
        """
        with self.watched():
            coroutine = getattr(fs, f"_{method}", None)
            if not inspect.iscoroutinefunction(coroutine):
                return getattr(fs, method)(*arguments, **options)
            limit = LIMIT + size / SLOWEST
            try:
                return sync(fs.loop, coroutine, *arguments, timeout=limit, **options)
            except asyncio.TimeoutError:
                raise TimeoutError(f"no answer within {limit:.0f} s") from None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A request; one that fails late keeps others from being made for a while.

        Raises:
            ConnectionError: it is not made.
        """
        began = time.monotonic()
        if began < self._asked_again:
            raise ConnectionError(f"not asked again yet after {self._why}")
        try:
            yield
        except (FileNotFoundError, FileExistsError):  # an answer, if a late one
            raise
        except Exception as error:
            now = time.monotonic()
            if now - began > _QUICK:
                self._asked_again, self._why = now + REST * (now - began), f"{type(error).__name__}: {error}"
            raise

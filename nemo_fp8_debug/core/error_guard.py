"""Keeps the monitor's exceptions out of the training loop: an error costs a sample, and one warning of its kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial

from ..errors import warn


class ErrorGuard:
    """Warns, or raises where tests ask for it."""

    def __init__(self, on_error: str) -> None:
        self.raises = on_error == "raise"
        #: tells the step that messages name
        self.step: Callable[[], int] = partial(int, -1)
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def guard(self, when: str) -> Iterator[None]:
        """A context that keeps an exception out of the training loop."""
        try:
            yield
        except Exception as error:
            if self.raises:
                raise
            with contextlib.suppress(Exception):  # to say so may take memory or a stack that is not there
                message = f"error {when} near step {self.step()}; that sample was dropped"
                self.warn(f"{message}: {type(error).__name__}: {error}", kind=f"{when} {type(error)}")

    def warn(self, message: str, kind: str | Collection[str] | None = None) -> None:
        """Warn once of each kind.

        Args:
            kind: if there are several, not all of them must have been warned of before; None: the message itself.
        """
        kinds = {kind or message} if kind is None or isinstance(kind, str) else set(kind)
        if new := kinds - self._warned:
            self._warned |= new
            warn(message)

"""The methods of a monitor that a run calls: what goes wrong inside costs a sample, and leaves the model as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from ..core.error_guard import ErrorGuard


class Guarded(Protocol):
    """What has such methods."""

    _errors: ErrorGuard

    def _drop_sample(self) -> None: ...


F = TypeVar("F", bound=Callable[..., None])


def entry(when: str) -> Callable[[F], F]:
    """A decorator of a method that a run calls.

    An exception inside it gives up the sample and is warned of. KeyboardInterrupt and SystemExit give it up too, which
    removes all hooks, and go on to the run.

    Args:
        when: what the method was doing, in words.
    """

    def decorated(method: F) -> F:
        @functools.wraps(method)
        def entered(self: Guarded, *args: Any, **kwargs: Any) -> None:
            with self._errors.guard(when):
                try:
                    method(self, *args, **kwargs)
                except BaseException:
                    with self._errors.guard("while giving a sample up"):
                        self._drop_sample()
                    raise

        return cast("F", entered)

    return decorated


def all_of(guard: Callable[[str], Any], steps: dict[str, Callable[[], object]]) -> None:
    """Do all steps in order, whatever one of them raises. An exception is warned of; an interrupt goes on when all are done.

    Args:
        guard: a context that keeps an exception from the run.
        steps: by what they do, in words.
    """
    interrupt: BaseException | None = None
    for when, step in steps.items():
        try:
            with guard(when):
                step()
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt:
        raise interrupt

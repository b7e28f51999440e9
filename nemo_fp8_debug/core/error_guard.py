"""Keeps the monitor's exceptions out of the training loop: one costs a sample or an operand, and a warning of its kind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from torch.utils import _python_dispatch

from ..errors import warn

F = TypeVar("F", bound=Callable[..., None])
#: told of (GEMM name, role, error, whether the operand is lost)
Fault = Callable[[str, str, Exception, bool], None]
_NONE: Sequence[Any] = ()


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


class Guarded(Protocol):
    """What has such methods."""

    _errors: ErrorGuard

    def _drop_sample(self) -> None: ...


def guard_entry(when: str) -> Callable[[F], F]:
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


class OperandGuard:
    """A fault within costs an operand, or what it was cast with. No generator: hooks enter hundreds of these.

    Its operators are not seen by the dispatch modes of the run.
    """

    __slots__ = ("_lost", "_modes", "_name", "_on_fault", "_role")

    def __init__(self, on_fault: Fault, name: str, role: str, lost: bool) -> None:
        self._on_fault, self._name, self._role, self._lost = on_fault, name, role, lost

    def __enter__(self) -> None:
        self._modes = leave_modes()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        enter_again(self._modes)
        if not isinstance(error, Exception):
            return False
        self._on_fault(self._name, self._role, error, self._lost)
        return True


def leave_modes() -> Sequence[Any]:
    """Leave the modes that are entered, in this thread; for `enter_again`. Those of tracing remain, and with them others."""
    modes: Sequence[Any] = _python_dispatch._get_current_dispatch_mode_stack()
    if not modes or any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return _NONE
    return [_python_dispatch._pop_mode() for _ in modes]


def enter_again(modes: Sequence[Any]) -> None:
    """Enter them as they were."""
    for mode in reversed(modes):
        _python_dispatch._push_mode(mode)

"""Keep exceptions of the monitor out of training. An exception drops a sample or an operand. Each kind gives one warning."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from torch.utils import _python_dispatch

from ..errors import warn

F = TypeVar("F", bound=Callable[..., None])
#: function that is called after an error, with (GEMM name, role, error, whether the operand is lost)
Fault = Callable[[str, str, Exception, bool], None]
_NONE: Sequence[Any] = ()


class ErrorGuard:
    """Turns exceptions into warnings, or raises them if `on_error` is "raise", as in tests."""

    def __init__(self, on_error: str) -> None:
        self.raises = on_error == "raise"
        #: function that returns the number of the step for messages
        self.step: Callable[[], int] = partial(int, -1)
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def guard(self, when: str) -> Iterator[None]:
        """Turn an exception inside this context into a warning."""
        try:
            yield
        except Exception as error:
            if self.raises:
                raise
            with contextlib.suppress(Exception):  # the warning may need more memory or stack than is left
                message = f"error {when} near step {self.step()}; that sample was dropped"
                self.warn(f"{message}: {type(error).__name__}: {error}", kind=f"{when} {type(error)}")

    def warn(self, message: str, kind: str | Collection[str] | None = None) -> None:
        """Warn once for each kind.

        Args:
            kind: the kind, by default the message itself. With several kinds, warn if any of them is new.
        """
        kinds = {kind or message} if kind is None or isinstance(kind, str) else set(kind)
        if new := kinds - self._warned:
            self._warned |= new
            warn(message)


class Guarded(Protocol):
    """A class whose methods `guard_entry_point` can decorate."""

    _errors: ErrorGuard

    def _drop_sample(self) -> None: ...


def guard_entry_point(when: str) -> Callable[[F], F]:
    """Return a decorator for a method that the run calls.

    An exception in the method drops the sample and gives a warning. KeyboardInterrupt and SystemExit also drop the sample,
    and are raised again. Dropping a sample removes all hooks.

    Args:
        when: what the method does, in words.
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


def run_all_guarded(guard: Callable[[str], Any], steps: dict[str, Callable[[], object]]) -> None:
    """Run all steps in order, even if one raises an exception. Exceptions give warnings. An interrupt is raised at the end.

    Args:
        guard: returns a context that turns an exception into a warning.
        steps: functions to run, each under a description of what it does.
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
    """A context in which an exception drops an operand, or only the record of its cast. Dispatch modes are off inside.

    This is a class, because hooks enter hundreds of these contexts and a generator would be slower.
    """

    __slots__ = ("_lost", "_modes", "_name", "_on_fault", "_role")

    def __init__(self, on_fault: Fault, name: str, role: str, lost: bool) -> None:
        self._on_fault, self._name, self._role, self._lost = on_fault, name, role, lost

    def __enter__(self) -> None:
        self._modes = leave_dispatch_modes()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        restore_dispatch_modes(self._modes)
        if not isinstance(error, Exception):
            return False
        self._on_fault(self._name, self._role, error, self._lost)
        return True


def leave_dispatch_modes() -> Sequence[Any]:
    """Leave this thread's dispatch modes and return them for `restore_dispatch_modes`. If a mode is tracing, leave none."""
    modes: Sequence[Any] = _python_dispatch._get_current_dispatch_mode_stack()
    if not modes or any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return _NONE
    return [_python_dispatch._pop_mode() for _ in modes]


def restore_dispatch_modes(modes: Sequence[Any]) -> None:
    """Enter the modes that `leave_dispatch_modes` returned."""
    for mode in reversed(modes):
        _python_dispatch._push_mode(mode)

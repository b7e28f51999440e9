"""Errors around one operand stay there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _python_dispatch

#: told of (GEMM name, role, error, whether the operand is lost)
Fault = Callable[[str, str, Exception, bool], None]


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


_NONE: Sequence[Any] = ()


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

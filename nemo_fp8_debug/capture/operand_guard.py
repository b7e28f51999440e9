"""Errors around one operand stay there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .unseen_operators import enter_again, leave_modes

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

"""Looks at the collectives of a stretch of a run: a mode that calls every operator unchanged, and waits for nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .operator_mode import OperatorMode

_NAMESPACES = ("c10d", "_c10d_functional")


class Collectives(OperatorMode):
    """Sees the collectives between `begin` and `end`."""

    def before(self, func: Any, args: Any) -> None:
        """A collective is about to run."""

    def after(self, func: Any, args: Any) -> None:
        """A collective has been called, and may still be under way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` as it is."""
        if getattr(func, "namespace", "") not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        with suppress(Exception):  # what was not seen is unknown
            self.before(func, args)
        out = func(*args, **(kwargs or {}))
        with suppress(Exception):
            self.after(func, args)
        return out

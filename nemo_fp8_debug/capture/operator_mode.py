"""A dispatch mode of torch that is entered and left by hooks, and calls every operator unchanged."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Sees operators between `begin` and `end`, in the thread that it began in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def begin(self) -> None:
        """Look from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Look no longer; modes that were entered since stay."""
        if not any(mode is self for mode in _python_dispatch._get_current_dispatch_mode_stack()):
            return
        later = []
        while _python_dispatch._get_current_dispatch_mode() is not self:
            later.append(_python_dispatch._pop_mode())
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(later):
            _python_dispatch._push_mode(mode)


def over_dtensors(types: Any) -> bool:
    """Whether an operator is called with DTensors; it then calls what this rank computes, which comes by itself."""
    return any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in types)


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

"""Dispatch modes that hooks enter and leave, which call every operator unchanged; and the amaxes that ranks share.

An engine that casts with the largest amax of a group of ranks reduces it while it runs. The shard of a rank does not tell
that scale, and nothing that a call leaves behind has to. So we look at the all-reduces of a module's forward, or of a node's
backward, if the module may share amaxes. We wait for nothing: an amax is read once the engine has waited for it itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse, UnknownCast
from .dispatcher import Dispatcher

_NAMESPACES = ("c10d", "_c10d_functional")
#: group of ranks and amax, in order
Reduced = Sequence[tuple[Any, torch.Tensor]]


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


class AmaxReductions(Collectives):
    """Sees what ranks reduce of a single float32 value."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, torch.Tensor]] = []

    def after(self, func: Any, args: Any) -> None:
        """Notes a value that ranks reduce, which they may not have done yet."""
        if func.overloadpacket.__name__ == "allreduce_":
            values, group = args[:2]
            if len(values) == 1 and values[0].numel() == 1 and values[0].dtype == torch.float32:
                self.seen.append((torch.distributed.ProcessGroup.unbox(group), values[0]))

    def begin(self) -> None:
        """Look from now on, and forget what was seen."""
        self.seen = []
        super().begin()


def with_shared_amax(use: ScaleInUse, reduced: Reduced) -> ScaleInUse:
    """The cast of an operand, its scale that of the amax that ranks have agreed on, if they share it.

    Args:
        reduced: while the engine's function ran that casts the operand before it reduces anything else in that group.

    Raises:
        UnknownCast: no reduction was seen.
    """
    if use.amax_group is None:
        return use
    amax = next((amax for group, amax in reduced if group == use.amax_group), None)
    if amax is None or not isinstance(use.scale, CurrentScaling):
        raise UnknownCast("ranks share its amax, and how they reduce it was not seen")
    return replace(use, scale=use.scale.scale(amax.reshape(()), use.format.max), amax_group=None)


def wait_for_backward(dispatcher: Dispatcher, node: Any) -> Callable[[Callable[[Reduced], None]], None]:
    """Return what has a function called with what ranks reduce while an autograd node runs. Does not hold the node."""
    mode, waiting = AmaxReductions(), list[Callable[[Reduced], None]]()

    def begin(*_: Any) -> None:
        if waiting:
            mode.begin()

    def end(*_: Any) -> None:
        if waiting:
            mode.end()
            takes = waiting.copy()
            waiting.clear()
            for take in takes:
                take(mode.seen)

    dispatcher.watch_node(node, nullcontext, begin, end)  # a guard would leave the mode
    return waiting.append


def wait_for_node(dispatcher: Dispatcher, node: Any) -> Callable[[Callable[[Reduced], None]], None]:
    """Return what has a function called once, as a node written in Python is about to run. Does not hold the node.

    To be called as the gradient arrives: hooks run in the order in which they came.
    """
    held = weakref.ref(node)  # which holds the hook of the tensor, which holds this

    def wait(take: Callable[[Reduced], None]) -> None:
        waiting, node = [take], held()

        def last(*_: Any) -> None:
            while waiting:
                waiting.pop()(())  # nothing is reduced before the node runs

        if node is None:
            last()
        else:
            dispatcher.watch_node(node, nullcontext, before=last)

    return wait

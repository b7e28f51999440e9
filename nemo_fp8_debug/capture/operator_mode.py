"""Define dispatch modes that observe operators and call them unchanged, and find amaxes that ranks share.

Some engines reduce the amax over a group of ranks during a call, and cast with the largest amax. A rank's shard does not
determine the scale of such a cast, and the call may not keep the scale. So if ranks may share the amax, we watch the
all-reduces of a module's forward, or of a node's backward. We do not wait for a reduction: we read an amax only after the
engine itself has waited.
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
from .backends.base import CastInUse, UnknownCastError
from .dispatcher import EventDispatcher

_NAMESPACES = ("c10d", "_c10d_functional")
#: the group of ranks and the amax of each reduction, in order
Reduced = Sequence[tuple[Any, torch.Tensor]]


class OperatorMode(TorchDispatchMode):
    """A mode that observes operators between `begin` and `end`, in the thread that called `begin`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions stay compiled."""
        return True

    def begin(self) -> None:
        """Observe from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop observing. Modes that were entered later stay active."""
        if not any(mode is self for mode in _python_dispatch._get_current_dispatch_mode_stack()):
            return
        later = []
        while _python_dispatch._get_current_dispatch_mode() is not self:
            later.append(_python_dispatch._pop_mode())
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(later):
            _python_dispatch._push_mode(mode)


def is_dtensor_call(types: Any) -> bool:
    """Return True if an operator is called with DTensors.

    Such an operator calls other operators on this rank's parts, which we observe instead.
    """
    return any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in types)


class CollectiveMode(OperatorMode):
    """A mode that observes the collectives between `begin` and `end`."""

    def on_collective_start(self, func: Any, args: Any) -> None:
        """Observe a collective that is about to run."""

    def on_collective_called(self, func: Any, args: Any) -> None:
        """Observe a collective that has been called, and may still be running."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` unchanged, and observe it if it is a collective."""
        if getattr(func, "namespace", "") not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        with suppress(Exception):  # after an error, the collective is ignored
            self.on_collective_start(func, args)
        out = func(*args, **(kwargs or {}))
        with suppress(Exception):
            self.on_collective_called(func, args)
        return out


class AmaxReductionMode(CollectiveMode):
    """A mode that observes reductions of a single float32 value over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, torch.Tensor]] = []

    def on_collective_called(self, func: Any, args: Any) -> None:
        """Note a value that ranks reduce. The reduction may not be finished."""
        if func.overloadpacket.__name__ == "allreduce_":
            values, group = args[:2]
            if len(values) == 1 and values[0].numel() == 1 and values[0].dtype == torch.float32:
                self.seen.append((torch.distributed.ProcessGroup.unbox(group), values[0]))

    def begin(self) -> None:
        """Observe from now on, and forget earlier reductions."""
        self.seen = []
        super().begin()


def apply_shared_amax(use: CastInUse, reduced: Reduced) -> CastInUse:
    """Return the cast of an operand. If ranks share the amax, use the scale that follows from their shared amax.

    Args:
        reduced: reductions during the engine's function. The first reduction in the operand's group is that of its
            amax.

    Raises:
        UnknownCastError: no reduction was seen.
    """
    if use.amax_group is None:
        return use
    amax = next((amax for group, amax in reduced if group == use.amax_group), None)
    if amax is None or not isinstance(use.scale, CurrentScaling):
        raise UnknownCastError("ranks share its amax, and their reduction was not seen")
    return replace(use, scale=use.scale.compute_scale(amax.reshape(()), use.format.max), amax_group=None)


def defer_until_backward(dispatcher: EventDispatcher, node: Any) -> Callable[[Callable[[Reduced], None]], None]:
    """Return a function that takes a callback. After the node has run, the callback receives the reductions in this run.

    Do not keep the node alive.
    """
    mode, waiting = AmaxReductionMode(), list[Callable[[Reduced], None]]()

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

    dispatcher.watch_autograd_node(node, nullcontext, begin, end)  # a guard would leave the mode too early
    return waiting.append


def defer_until_node(dispatcher: EventDispatcher, node: Any) -> Callable[[Callable[[Reduced], None]], None]:
    """Return a function that takes a callback. The callback is called once, before a node written in Python runs.

    Call the returned function when the gradient arrives, because hooks run in the order of their registration. Do not keep
    the node alive.
    """
    held = weakref.ref(node)  # a strong reference would be a cycle: node, hook of the tensor, this function

    def wait(take: Callable[[Reduced], None]) -> None:
        waiting, node = [take], held()

        def last(*_: Any) -> None:
            while waiting:
                waiting.pop()(())  # empty, because no amax is reduced before the node runs

        if node is None:
            last()
        else:
            dispatcher.watch_autograd_node(node, nullcontext, before=last)

    return wait

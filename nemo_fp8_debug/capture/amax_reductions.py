"""Amaxes that ranks share: an engine that casts with the largest amax of a group of ranks reduces it while it runs.

The shard of a rank does not tell that scale, and nothing that a call leaves behind has to. So the all-reduces of a module's
forward, or of a node's backward, are looked at by a mode that calls every operator unchanged; only of modules that may share
amaxes. Nothing is waited for: an amax is looked at once the engine has waited for it itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse, UnknownCast
from .dispatcher import Dispatcher
from .operator_mode import Collectives

#: group of ranks and amax, in order
Reduced = Sequence[tuple[Any, torch.Tensor]]


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

"""Amaxes that ranks share: an engine that casts with the largest amax of a group of ranks reduces it while it runs.

The shard of a rank does not tell that scale, and nothing that a call leaves behind has to. So the all-reduces of a module's
forward, or of a node's backward, are looked at by a mode that calls every operator unchanged; only of modules that may share
amaxes. Nothing is waited for: an amax is looked at once the engine has waited for it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse, UnknownCast
from .collectives import Collectives
from .tracing import Hook

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


class Forwards:
    """What ranks reduce in the forward of modules, by module; of the call that has returned last."""

    def __init__(self) -> None:
        self._reduced: dict[nn.Module, Reduced] = {}

    def of(self, module: nn.Module) -> Reduced:
        """Nothing of a module that is not looked at."""
        return self._reduced.get(module, ())

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Look at a module's calls, until the hooks are removed; before all hooks that were there."""
        mode = AmaxReductions()

        def begin(*_: Any) -> None:
            mode.begin()

        def end(*_: Any) -> None:
            mode.end()
            self._reduced[module] = mode.seen

        return [
            module.register_forward_pre_hook(Hook(begin, module), prepend=True),
            module.register_forward_hook(Hook(end, module), prepend=True, always_call=True),
        ]


class AfterBackward:
    """Waits until the function of an autograd node has run, and sees what ranks reduce meanwhile. Does not hold the node."""

    def __init__(self, node: Any) -> None:
        self._mode = AmaxReductions()
        self._waiting: list[Callable[[Reduced], None]] = []
        node.register_prehook(self._begin)
        node.register_hook(self._end)

    def wait(self, take: Callable[[Reduced], None]) -> None:
        """Have `take` called with what ranks have reduced."""
        self._waiting.append(take)

    def _begin(self, *_: Any) -> None:
        if self._waiting:
            self._mode.begin()

    def _end(self, *_: Any) -> None:
        if self._waiting:
            self._mode.end()
            waiting, self._waiting = self._waiting, []
            for take in waiting:
                take(self._mode.seen)

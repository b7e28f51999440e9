"""Stands in for a function of the framework for the length of a sampled step, where the framework has no event for what
it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..numerics.block_scaling import BlockRule
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling


class CastOverride(Protocol):
    """What casts the operands of a module instead of its engine."""

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """By role."""

    def quantizes(self, role: str) -> bool:
        """Whether `role` is cast at all."""

    def scale(self, role: str) -> torch.Tensor | CurrentScaling | BlockRule:
        """What `role` is cast with in the present step: a float32 scalar, or a rule that finds it from each tensor."""


#: modules whose operands are quantized by emulation
EMULATED: weakref.WeakKeyDictionary[nn.Module, CastOverride] = weakref.WeakKeyDictionary()
#: modules whose engine is told, in hooks that run after those that ask, to use another recipe of its own; None: none at all
SWITCHED: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def find_emulation(module: nn.Module) -> CastOverride | None:
    """The emulation that acts on `module`, if any."""
    return EMULATED.get(module)


#: told of what is to be seen; must not raise
Watcher = Callable[[Any], None]
#: calls the function that it is given first, with the arguments that follow, and tells the watcher
Call = Callable[..., Any]

_ABSENT = object()


class PatchedFunction:
    """The function while anyone watches it; several may, and leave in any order."""

    def __init__(self, holder: Any, name: str, call: Call) -> None:
        self._holder, self._name, self._call = holder, name, call
        self._own = vars(holder).get(name, _ABSENT)
        self._original = getattr(holder, name)
        self._watchers: list[Watcher] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the framework calls."""
        return self._call(self._original, self._tell, *arguments, **options)

    def _tell(self, seen: Any) -> None:
        for watcher in list(self._watchers):
            watcher(seen)

    def join(self, watcher: Watcher) -> Callable[[], None]:
        """Tell this one too, until what is returned is called."""
        self._watchers.append(watcher)
        return partial(self._leave, watcher)

    def _leave(self, watcher: Watcher) -> None:
        if watcher in self._watchers:  # to leave twice does nothing
            self._watchers.remove(watcher)
        if self._watchers or vars(self._holder).get(self._name) is not self:
            return
        if self._own is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._own)


def watch_calls(holder: Any, name: str, call: Call, watcher: Watcher) -> Callable[[], None]:
    """Watch the calls of `holder.name`, a module's or an object's; returns what ends that."""
    current = vars(holder).get(name)
    if not isinstance(current, PatchedFunction):
        current = PatchedFunction(holder, name, call)
        setattr(holder, name, current)
    return current.join(watcher)

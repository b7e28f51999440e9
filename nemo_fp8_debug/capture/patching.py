"""Replace a framework's function during a sampled step, if the framework has no event for the function's results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..numerics.block_scaling import BlockScalingRule
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling


class CastOverride(Protocol):
    """An object that casts a module's operands in place of the module's engine."""

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Recipes by role."""

    @property
    def planned_roles(self) -> Collection[str]:
        """Roles whose recipe a plan chose instead of the run's recipe."""

    def quantizes(self, role: str) -> bool:
        """Return True if `role` is cast."""

    def scale(self, role: str) -> torch.Tensor | CurrentScaling | BlockScalingRule:
        """Return the scale of `role` in this step: a float32 scalar, or a rule that computes it from each tensor."""


#: modules whose operands are quantized by emulation
EMULATED: weakref.WeakKeyDictionary[nn.Module, CastOverride] = weakref.WeakKeyDictionary()
#: for each switched module, the recipe that its engine uses instead of the run's recipe, or None for high precision. Hooks
#: that switch recipes run after hooks that read recipes
SWITCHED: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def find_emulation(module: nn.Module) -> CastOverride | None:
    """Return the emulation of `module`, if any."""
    return EMULATED.get(module)


#: function modes of torch that change no operands
_HARMLESS_MODES = ("torch.utils._device", "torch.overrides")


def explain_function_modes() -> str:
    """Return why active torch function modes may change or quantize operands, or "" if none does."""
    if not torch._C._len_torch_function_stack():
        return ""
    modes: Any = torch.overrides._get_current_function_mode_stack()
    names = [type(mode).__name__ for mode in modes if type(mode).__module__ not in _HARMLESS_MODES]
    return f"the torch function mode {names[0]} may change or quantize operands" if names else ""


#: called with what was observed; must not raise an exception
Watcher = Callable[[Any], None]
#: receives a function, a watcher and arguments. Calls the function with the arguments, and reports to the watcher
Call = Callable[..., Any]

_ABSENT = object()


class PatchedFunction:
    """A function that stays patched as long as it has watchers. Watchers may leave in any order."""

    def __init__(self, holder: Any, name: str, call: Call) -> None:
        self._holder, self._name, self._call = holder, name, call
        self._own = vars(holder).get(name, _ABSENT)
        self._original = getattr(holder, name)
        self._watchers: list[Watcher] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the original function, and report to the watchers. The framework calls this."""
        return self._call(self._original, self._tell, *arguments, **options)

    def _tell(self, seen: Any) -> None:
        for watcher in list(self._watchers):
            watcher(seen)

    def add_watcher(self, watcher: Watcher) -> Callable[[], None]:
        """Add a watcher. Return a function that removes it."""
        self._watchers.append(watcher)
        return partial(self._leave, watcher)

    def _leave(self, watcher: Watcher) -> None:
        if watcher in self._watchers:  # a second call does nothing
            self._watchers.remove(watcher)
        if self._watchers or vars(self._holder).get(self._name) is not self:
            return
        if self._own is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._own)


def watch_function_calls(holder: Any, name: str, call: Call, watcher: Watcher) -> Callable[[], None]:
    """Watch the calls of a function in a Python module or an object. Return a function that stops watching."""
    current = vars(holder).get(name)
    if not isinstance(current, PatchedFunction):
        current = PatchedFunction(holder, name, call)
        setattr(holder, name, current)
    return current.add_watcher(watcher)

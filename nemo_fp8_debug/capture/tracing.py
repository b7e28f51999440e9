"""Detect modules that were compiled after a monitor was attached. Our hooks must not change the compiled graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .scan import ScannedModule

#: names (from `_name_of`) of modules whose hook Dynamo has traced
_traced: set[str] = set()


#: names of modules that have, or had, a hook. We do not use ids, because an id may be reused for another module
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_numbers = itertools.count(1)


def _name_of(module: nn.Module) -> str:
    if module not in _names:
        _names[module] = str(next(_numbers))
    return _names[module]


def _note(name: str) -> None:
    _traced.add(name)


# Dynamo calls this function while tracing, and does not put it into the graph. torch.compiler.assume_constant_result marks
# functions in the same way, but imports Dynamo.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


class CopySafeHook:
    """A hook that works only on its own module. In a copy or pickle of the module, the hook does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None, module: nn.Module | None = None) -> None:
        """
        Args:
            call: function to call, if any.
            module: module that the hook observes, or None if the hook must also run inside torch.compile. There, a hook
                with a module only notes that the module is compiled.
        """
        self._call = call
        self._name = "" if module is None else _name_of(module)

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook's function, unless Dynamo is tracing an observing hook. Torch calls this."""
        if self._name and torch.compiler.is_compiling():
            _note(self._name)
            return None
        return self._call(*arguments) if self._call else None

    def __reduce__(self) -> tuple[type[CopySafeHook], tuple[()]]:
        return CopySafeHook, ()


def find_compiled_modules(scanned: Collection[ScannedModule]) -> set[int]:
    """Return the ids of a model's modules that are known to run inside torch.compile."""
    compiled = {id(one.module) for one in scanned if one.compiled}
    if _traced:
        compiled |= {id(one.module) for one in scanned if _names.get(one.module) in _traced}
    return compiled

"""Modules that torch.compile runs since a monitor was attached: their hooks are traced, and must not change the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .scan import ScannedModule

#: what Dynamo has traced a hook of, by `_name_of`
_traced: set[str] = set()


#: of modules that have had a hook; no id, which another module gets later
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_numbers = itertools.count(1)


def _name_of(module: nn.Module) -> str:
    if module not in _names:
        _names[module] = str(next(_numbers))
    return _names[module]


def _note(name: str) -> None:
    _traced.add(name)


# Dynamo calls it while it traces, and puts nothing of it into the graph. So does torch.compiler.assume_constant_result,
# which imports Dynamo.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Hook:
    """A hook that stays with its module: a copy or pickle of the module gets one that does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None, module: nn.Module | None = None) -> None:
        """
        Args:
            call: what it does; None: nothing.
            module: whose hook it is, if it only looks: in a graph of torch.compile it does nothing then, which is noted.
        """
        self._call = call
        self._name = "" if module is None else _name_of(module)

    def __call__(self, *arguments: Any) -> Any:
        """What torch calls."""
        if self._name and torch.compiler.is_compiling():
            _note(self._name)
            return None
        return self._call(*arguments) if self._call else None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def find_compiled_by_now(scanned: Collection[ScannedModule]) -> set[int]:
    """Return the ids of modules of a model that run inside torch.compile, as far as is known."""
    compiled = {id(one.module) for one in scanned if one.compiled}
    if _traced:
        compiled |= {id(one.module) for one in scanned if _names.get(one.module) in _traced}
    return compiled

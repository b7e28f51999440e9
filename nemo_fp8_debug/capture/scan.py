"""Walk over all modules of a model. All code that classifies modules reads the result of this walk."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from ..core.layer_names import WRAPPERS
from .backends.parallel import find_first_expert_index

#: names of lists of a rank's experts in Megatron and DeepSpeed. The module two levels above has the group of ranks
_EXPERT_LISTS = ("local_experts", "deepspeed_experts")


class ScannedModule:
    """A module of a model, and its place in the model."""

    #: whether the module runs inside torch.compile, where a hook would become part of the graph and change it
    compiled = False

    def __init__(self, module: nn.Module, holder: ScannedModule | None = None, key: str = "") -> None:
        """
        Args:
            holder: the parent module, or None for a root.
            key: name in the parent.
        """
        self.module, self.holder, self.key = module, holder, key

    @cached_property
    def root(self) -> nn.Module:
        """Return the root module of the scan that contains this module."""
        return self.holder.root if self.holder else self.module

    @cached_property
    def path_in_root(self) -> str:
        """Return the name that `named_modules` gives the module."""
        return f"{self.holder.path_in_root}.{self.key}" if self.holder and self.holder.holder else self.key

    @cached_property
    def global_name(self) -> str:
        """Return the global name, which does not depend on wrappers or pipeline stages."""
        return ".".join(self._parts) or "model"

    @property
    def enclosing_modules(self) -> Sequence[nn.Module]:
        """Return the modules around this one, innermost first."""
        found, outer = [], self.holder
        while outer is not None:
            found.append(outer.module)
            outer = outer.holder
        return found

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        """Return the parts of the global name."""
        holder, key = self.holder, self.key
        if holder is None:
            return ()
        outer = () if key == "module" and holder._is_chunk else holder._parts
        if key in WRAPPERS:
            return outer
        if key.isdigit():
            number = _read_megatron_number(self.module)
            experts = holder.key in _EXPERT_LISTS and holder.holder and holder.holder.holder
            if number is not None:
                key = str(number - 1)
            elif experts:
                key = str(int(key) + find_first_expert_index(len(holder.module._modules), experts.module))
        return (*outer, key)

    @property
    def _is_chunk(self) -> bool:
        """Return True for a chunk in the list of a model's chunks, if a wrapper holds the chunk as `module`."""
        outermost = self.holder is not None and not self.holder._parts and isinstance(self.root, nn.ModuleList)
        return outermost and self.key.isdigit() and _read_megatron_number(self.module) is None


def scan_modules(roots: Iterable[nn.Module]) -> list[ScannedModule]:
    """Return the modules of each root, in the order of `named_modules`, without repeating a module of the same root.

    Args:
        roots: the model, or its chunks if a virtual pipeline splits it.
    """
    found = [one for root in roots for one in _walk(root, set())]
    optimized: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    compiled: set[int] = set()
    for one in found:
        if one.module._compiled_call_impl is not None or (optimized and isinstance(one.module, optimized)):
            _walk(one.module, compiled)
    for one in found if compiled else ():
        one.compiled = id(one.module) in compiled
    return found


def list_inner_module_ids(module: nn.Module) -> set[int]:
    """Return the ids of all modules inside a module."""
    found: set[int] = set()
    _walk(module, found)
    return found - {id(module)}


def _walk(root: nn.Module, seen: set[int]) -> list[ScannedModule]:
    """Return the modules of a root, and add their ids to `seen`. Skip modules whose id is already in `seen`.

    Each sampled step walks through hundreds of modules, so this function must be as fast as `named_modules`.
    """
    found, waiting = list[ScannedModule](), [ScannedModule(root)]
    while waiting:
        one = waiting.pop()
        if id(one.module) not in seen:
            seen.add(id(one.module))
            found.append(one)
            if children := one.module._modules:
                for key, child in reversed(children.items()):
                    if child is not None:
                        waiting.append(ScannedModule(child, one, key))
    return found


def _read_megatron_number(module: nn.Module) -> int | None:
    """Return Megatron's number of a layer: 1-based, over all pipeline stages. Other frameworks count differently."""
    if not any(kind.__module__.partition(".")[0] == "megatron" for kind in type(module).__mro__):
        return None
    number = getattr(module, "layer_number", None)
    return number if isinstance(number, int) else None

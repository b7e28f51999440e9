"""Which module runs at present, and which one a node of the backward graph belongs to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

#: under which a node of the graph has the name of its module
_KEY = "nemo_fp8_debug.module"


class ModuleStack:
    """Hooks on all modules of a model, as long as it is open."""

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._modules = modules
        self._local = threading.local()
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleStack:
        for module in self._modules:
            self._handles += (
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def innermost(self) -> str:
        """The module that runs, "" outside of all."""
        return self._stack[-1][0] if self._stack else ""

    def entered_in_backward(self) -> bool:
        """Whether the module that runs was called inside a backward."""
        return bool(self._stack and self._stack[-1][1])

    def of_backward(self) -> str:
        """The module whose forward made the node that runs now."""
        node: Any = torch._C._current_autograd_node()
        return str(node.metadata.get(_KEY, "")) if node is not None else ""

    @property
    def _stack(self) -> list[tuple[str, bool, set[Any]]]:
        """Of this thread: name, whether a backward runs, and the nodes that made the module's inputs."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[str, bool, set[Any]]] = self._local.stack
        return stack

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = set(_nodes((args, kwargs)))
        self._stack.append((self._modules[module], torch._C._current_graph_task_id() != -1, inputs))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            name, _, inputs = self._stack.pop()
            _mark(out, inputs, name)


def _nodes(values: Any) -> Iterator[Any]:
    return (leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None)


def _mark(out: Any, stop: set[Any], name: str) -> None:
    """Give the nodes from an output back to the inputs a name, but for those that an inner module has named."""
    waiting = [node for node in _nodes(out) if node not in stop]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if _KEY not in node.metadata:
            node.metadata[_KEY] = name
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in stop:
                seen.add(following)
                waiting.append(following)

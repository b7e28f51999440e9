"""Counts what a step really multiplies: every operator is called unchanged, and its shapes are read."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.scan import scan_modules
from ..core.arguments import shown
from ..errors import ConfigError
from .module_stack import ModuleStack
from .operators import is_unknown, size_of

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


@dataclass(frozen=True)
class ObservedCoverage:
    """Multiply-adds of what ran while it was observed; complete when the context ends."""

    #: by (module, operator, pass); the pass is `forward`, `backward` or `recompute`; "" is outside of all modules
    multiply_adds: Mapping[tuple[str, str, str], float] = field(default_factory=Counter)
    #: calls of operators that look like products and cannot be counted, by name
    not_counted: Mapping[str, int] = field(default_factory=Counter)
    #: modules of Transformer Engine: their kernels are not torch operators, and what they multiply is not seen
    not_seen: Sequence[str] = ()

    def total(self, passed: str | None = None, module: str = "", operator: str = "") -> float:
        """Multiply-adds of a pass, a module and an operator.

        Args:
            passed: `forward`, `backward` or `recompute`; None: all.
            module: regular expression that is found in the names of modules.
            operator: likewise, of operators, such as `^bmm$`.
        """
        return math.fsum(
            size
            for (name, op, when), size in self.multiply_adds.items()
            if passed in (None, when) and re.search(module, name) and re.search(operator, op)
        )


@contextlib.contextmanager
def observe_coverage(model: nn.Module | Sequence[nn.Module]) -> Iterator[ObservedCoverage]:
    """Count the multiply-adds of every matrix product, convolution and attention that runs in a `with` block.

    Operators are called unchanged, so losses stay the same bit by bit. Each is counted for the innermost module that calls
    it; a backward product for the module whose forward it belongs to. What a backward does again of the forward is
    `recompute`: checkpointed modules, and the scores in the backward of fused attention. Causal masks are not taken off.
    It slows a step down on the host: use it for one step. Code inside torch.compile is not observed.

    Args:
        model: a module, or the list of its chunks.

    Returns:
        A context, whose value is what is counted.

    Raises:
        ConfigError: it is no model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with observe_coverage(model) as counted:
        ...     model(torch.randn(3, 4)).sum().backward()
        >>> counted.total("forward"), counted.total("backward")
        (24.0, 24.0)
    """
    roots = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if not roots or not all(isinstance(root, nn.Module) for root in roots):
        raise ConfigError(f"model is {shown(model)}; observe_coverage takes a torch.nn.Module, or the list of its chunks")
    modules = {one.module: one.name for one in scan_modules(roots)}
    hidden = [name for module, name in modules.items() if type(module).__module__.startswith("transformer_engine.")]
    counted = ObservedCoverage(not_seen=hidden)
    with ModuleStack(modules) as stack, _Counting(counted, stack):
        yield counted


class _Counting(TorchDispatchMode):
    """Calls every operator as it is."""

    def __init__(self, counted: ObservedCoverage, stack: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted, self._stack = counted, stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented  # it then calls what this rank computes, which comes here
        out = func(*args, **(kwargs or {}))
        with contextlib.suppress(Exception):  # the run goes on, whatever its operators are given
            if not any(isinstance(x, FakeTensor) or getattr(x, "is_meta", False) for x in args):  # which has no values
                self._count(func, args)
        return out

    def _count(self, func: Any, args: Sequence[Any]) -> None:
        name = func.name().rpartition("::")[2].partition(".")[0]
        size = size_of(func, args)
        if size is None:
            if is_unknown(func):
                self._counted.not_counted[func.name()] += 1  # type: ignore[index]
            return
        when = self._when()
        where = self._stack.of_backward() if when == BACKWARD else self._stack.innermost()
        self._add(where, name, when, size[0])
        self._add(where, name, RECOMPUTE, size[1])

    def _add(self, *key_and_size: Any) -> None:
        *key, size = key_and_size
        if size:
            self._counted.multiply_adds[tuple(key)] += size  # type: ignore[index]

    def _when(self) -> str:
        """A backward runs without gradients; a forward inside it is one that is done again."""
        if torch._C._current_graph_task_id() == -1:
            return FORWARD
        return RECOMPUTE if self._stack.entered_in_backward() or torch.is_grad_enabled() else BACKWARD

"""Hooks that exist during one sampled step and hand each operand of each GEMM over exactly once.

Where each operand is seen, and why there:
X and W  in a forward pre-hook that runs before all others: an intervention that replaces operands has not yet done so.
dY       in a tensor hook on the output, set before all others see that output: it gets the gradient before anyone changes
         it, and unlike a module's backward hook it works for inputs without gradient and outputs changed in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .layers import Gemm
from .operands import Operand

Fault = Callable[[str, Exception], None]


class Capture:
    """The hooks of one sampled step.

    Activation recompute runs a module's forward twice, once of them inside backward. A forward inside backward counts only
    where the first one could not: under `no_grad`, where it left no output to hook.
    """

    def __init__(self, operands: Mapping[tuple[str, str], Operand], on_fault: Fault) -> None:
        """
        Args:
            operands: by (GEMM name, role); those that are to be looked at.
            on_fault: told of a fault in a hook, which costs that operand and nothing else.
        """
        self._operands = operands
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []
        self._without_grad: Counter[str] = Counter()  # forwards that a recompute is still to come for
        self._counting: dict[str, bool] = {}

    def attach(self) -> None:
        """Install the hooks."""
        for gemm in {name: operand.gemm for (name, _), operand in self._operands.items()}.values():
            before = self._guarded(gemm, self._before_forward)
            after = self._guarded(gemm, self._after_forward)
            self._handles += [
                gemm.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                gemm.module.register_forward_hook(after, prepend=True),
            ]

    def detach(self) -> None:
        """Remove the hooks; gradients that arrive later are ignored."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._operands = {}

    def _guarded(self, gemm: Gemm, hook: Callable[..., None]) -> Callable[..., None]:
        def run(module: nn.Module, *arguments: Any) -> None:
            try:
                hook(gemm, module, *arguments)
            except Exception as error:
                self._on_fault(gemm.name, error)

        return run

    def _before_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counting[gemm.name] = counts = self._counts(gemm.name)
        if not counts:
            return
        for role, find in (("input", gemm.host.input), ("weight", gemm.host.weight)):
            operand = self._operands.get((gemm.name, role))
            if operand and (x := find(module, args, kwargs)) is not None:
                operand.add(as_multiplied(x))

    def _counts(self, name: str) -> bool:
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recompute
            if self._without_grad[name] == 0:
                return False
            self._without_grad[name] -= 1
            return True
        if not torch.is_grad_enabled():
            self._without_grad[name] += 1
            return False
        return True

    def _after_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        y = gemm.host.output(out)
        operand = self._operands.get((gemm.name, "grad_output"))
        if operand is None or not self._counting.get(gemm.name) or not y.requires_grad:
            return

        def take(grad: torch.Tensor) -> None:
            if (gemm.name, "grad_output") not in self._operands:
                return
            try:
                operand.add(grad)
            except Exception as error:
                self._on_fault(gemm.name, error)

        y.register_hook(take)


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """The operand in the dtype that autocast gives it on the way into the GEMM."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(kind))
    return x

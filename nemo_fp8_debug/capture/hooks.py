"""Hooks that exist during one sampled step and hand each operand of each GEMM over exactly once.

Where each operand is seen, and why there:
X and W  in a forward pre-hook that runs before all others: an intervention that replaces operands has not yet done so.
dY       in a tensor hook on the output, set before all others see that output: it gets the gradient before anyone changes
         it, and unlike a module's backward hook it works for inputs without gradient and outputs changed in place.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .layers import Gemm
from .operands import Operand

#: told of (GEMM name, role, error)
Fault = Callable[[str, str, Exception], None]


class Hook:
    """A hook that stays with its module: a copy or pickle of the module gets one that does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """What torch calls."""
        return self._call(*arguments) if self._call else None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


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
        self._without_grad: Counter[str] = Counter()  # forwards that a recompute may still come for
        self._with_grad: set[str] = set()  # counted outside backward: a recompute of these adds nothing
        self._counting: dict[str, bool] = {}

    def attach(self) -> None:
        """Install the hooks."""
        for gemm in {name: operand.gemm for (name, _), operand in self._operands.items()}.values():
            before, after = (Hook(partial(self._run, hook, gemm)) for hook in (self._before_forward, self._after_forward))
            self._handles += [
                gemm.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                gemm.module.register_forward_hook(after, prepend=True),
            ]

    def _run(self, hook: Callable[..., None], gemm: Gemm, *arguments: Any) -> None:
        with self._guarded(gemm.name, "input"):
            hook(gemm, *arguments)

    def detach(self) -> None:
        """Remove the hooks; gradients that arrive later are ignored."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._operands = {}

    @contextlib.contextmanager
    def _guarded(self, name: str, role: str) -> Iterator[None]:
        """A fault within costs this operand."""
        try:
            yield
        except Exception as error:
            self._on_fault(name, role, error)

    def _before_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counting[gemm.name] = counts = self._counts(gemm.name, module.training)
        if not counts:
            return
        for role, find in (("input", gemm.host.input), ("weight", gemm.host.weight)):
            operand = self._operands.get((gemm.name, role))
            with self._guarded(gemm.name, role):
                if operand and (x := find(module, args, kwargs)) is not None:
                    operand.add(as_multiplied(x))

    def _counts(self, name: str, training: bool) -> bool:
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recompute
            if name in self._with_grad or self._without_grad[name] == 0:
                return False
            self._without_grad[name] -= 1
            return True
        if not torch.is_grad_enabled():
            self._without_grad[name] += training
            return False
        self._with_grad.add(name)
        return True

    def _after_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        key = gemm.name, "grad_output"
        operand = self._operands.get(key)
        if operand is None or not self._counting.get(gemm.name):
            return

        def take(grad: torch.Tensor) -> None:
            with self._guarded(*key):
                if key in self._operands:
                    operand.add(grad)

        with self._guarded(*key):
            y = gemm.host.output(out)
            if y.requires_grad:
                y.register_hook(take)


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """The operand in the dtype that autocast gives it on the way into the GEMM; autocast leaves float64 alone."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x

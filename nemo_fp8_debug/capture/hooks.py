"""Hooks that exist during one sampled step and hand each operand of each GEMM over exactly once.

Where each operand is seen, and why there:
X and W  in a forward pre-hook that runs before all others: an intervention that replaces operands has not yet done so.
dY       in a tensor hook on the output, set before all others see that output: it gets the gradient before anyone changes
         it, and unlike a module's backward hook it works for inputs without gradient and outputs changed in place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .layers import Gemm

#: told of (GEMM name, role, error)
Fault = Callable[[str, str, Exception], None]


class Taker(Protocol):
    """Gets an operand of one GEMM, a tensor for each call."""

    gemm: Gemm

    def add(self, x: torch.Tensor, order: int) -> None:
        """Take a tensor; nothing may be kept of it that could change.

        Args:
            order: place of the call in the step's order of execution.
        """


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

    def __init__(self, takers: Mapping[tuple[str, str], Taker], on_fault: Fault) -> None:
        """
        Args:
            takers: by (GEMM name, role): what gets each operand that is to be looked at.
            on_fault: told of a fault in a hook, which costs that operand and nothing else.
        """
        self._takers = takers
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []
        self._order = itertools.count(step=2)
        self._without_grad: dict[str, deque[int]] = defaultdict(deque)  # forwards that a recompute may still come for
        self._with_grad: set[str] = set()  # counted outside backward: a recompute of these adds nothing
        self._counting: dict[str, bool] = {}

    def attach(self) -> None:
        """Install the hooks."""
        for gemm in {name: taker.gemm for (name, _), taker in self._takers.items()}.values():
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
        self._takers = {}

    @contextlib.contextmanager
    def _guarded(self, name: str, role: str) -> Iterator[None]:
        """A fault within costs this operand."""
        try:
            yield
        except Exception as error:
            self._on_fault(name, role, error)

    def _before_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        order = self._counted(gemm.name, module.training)
        self._counting[gemm.name] = order is not None
        if order is None:
            return
        for place, role, find in ((order, "input", gemm.host.input), (order + 1, "weight", gemm.host.weight)):
            taker = self._takers.get((gemm.name, role))
            with self._guarded(gemm.name, role):
                if taker and (x := find(module, args, kwargs)) is not None:
                    taker.add(as_multiplied(x), place)

    def _counted(self, name: str, training: bool) -> int | None:
        """The place of a forward in the order of execution, a recompute's that of its first pass; None: not counted."""
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recompute
            first_passes = self._without_grad[name]
            return first_passes.popleft() if first_passes and name not in self._with_grad else None
        if not torch.is_grad_enabled():
            if training:
                self._without_grad[name].append(next(self._order))
            return None
        self._with_grad.add(name)
        return next(self._order)

    def _after_forward(self, gemm: Gemm, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        key = gemm.name, "grad_output"
        taker = self._takers.get(key)
        if taker is None or not self._counting.get(gemm.name):
            return

        def take(grad: torch.Tensor) -> None:
            with self._guarded(*key):
                if key in self._takers:
                    taker.add(grad, next(self._order))

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

"""The hooks of one sampled step on norms, routers and attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...core.keys import Key
from ..attention import is_attention
from ..backends.base import Args, Kwargs
from ..operand_guard import Fault, OperandGuard
from ..operands import MEASURED, Operand
from ..operator_mode import OperatorMode
from ..passes import Pass, Passes
from ..tracing import Hook
from .attention_logits import Scores, attention_sums, of_module, seen_logits
from .norms import channel_sums, input_of, output_of
from .routers import Choice, Router, load_sums, router_sums
from .sites import Site

_LOGITS = ("router_logits",)
_NO_LOGITS = "no operator of torch showed them"
_Begin = Callable[[Pass, Args, Kwargs], None]
_End = Callable[[Pass, Args, Kwargs, Any], None]


class ActivationCapture:
    """Looks at activations between `attach` and `detach`; forward calls count as they do for operands."""

    def __init__(
        self, sites: Sequence[Site], operands: Mapping[Key, Operand], on_fault: Fault, order: Iterator[int] | None = None
    ) -> None:
        """
        Args:
            operands: by (name, role): what gets each activation.
            on_fault: told of a fault.
            order: gives out places in the order of execution; what is captured together shares it.
        """
        self._sites, self._operands, self._on_fault = sites, dict(operands), on_fault
        self._passes = Passes(order)
        self._handles: list[RemovableHandle] = []
        self._open: dict[nn.Module, Pass] = {}
        self._modes: dict[nn.Module, OperatorMode] = {}

    def attach(self) -> None:
        """Install the hooks."""
        for site in self._sites:
            module, name, roles = site.gemm.module, site.gemm.name, site.roles
            if site.router is not None:
                self._attach_router(name, site.router)
            elif "attention_logits" not in roles:
                self._hook(module, name, roles, partial(self._before_norm, name), partial(self._after_norm, name))
            elif is_attention(module) or _is_of_megatron(module):
                self._hook(module, name, roles, partial(self._read_arguments, name, module), _nothing)
            else:
                begin, end = (partial(f, name, module) for f in (self._watch_scores, self._end_scores))
                self._hook(module, name, roles, begin, end)

    def detach(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        for mode in self._modes.values():
            mode.end()
        self._handles, self._operands, self._modes, self._open = [], {}, {}, {}

    def _hook(self, module: nn.Module, name: str, roles: Sequence[str], begin: _Begin, end: _End) -> None:
        """
        Args:
            roles: what each of the two looks at.
            begin: at the beginning of each forward that counts.
            end: once it has returned.
        """

        def before(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            with OperandGuard(self._on_fault, name, roles[0], True):
                if (counted := self._passes.counted(module)) is not None:
                    self._open[module] = counted
                    begin(counted, args, kwargs)
            if (mode := self._modes.get(module)) is not None:
                mode.begin()

        def after(_: nn.Module, args: Args, kwargs: Kwargs, out: Any) -> None:
            if (mode := self._modes.get(module)) is not None:
                mode.end()
            counted = self._open.pop(module, None)
            if counted is not None and out is not None:
                with OperandGuard(self._on_fault, name, roles[-1], True):
                    end(counted, args, kwargs, out)
            self._modes.pop(module, None)

        self._handles += [
            module.register_forward_pre_hook(Hook(before, module), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(after, module), prepend=True, with_kwargs=True, always_call=True),
        ]

    def _add(self, name: str, role: str, x: torch.Tensor, order: int, further: torch.Tensor) -> None:
        operand = self._operands.get((name, role))
        if operand is not None:
            calls = operand.calls
            operand.add(x if x.dtype in MEASURED else x.float(), order)
            if operand.calls > calls:  # else another rank counts it
                operand.add_further(further)

    def _before_norm(self, name: str, counted: Pass, args: Args, kwargs: Kwargs) -> None:
        x = input_of(args, kwargs).detach()
        self._add(name, "norm_input", x, counted.order, channel_sums(x))

    def _after_norm(self, name: str, counted: Pass, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (name, "norm_output") in self._operands:
            y = output_of(out, input_of(args, kwargs)).detach()
            self._add(name, "norm_output", y, next(self._passes.order), channel_sums(y))

    def _read_arguments(self, name: str, module: nn.Module, counted: Pass, args: Args, kwargs: Kwargs) -> None:
        self._add_attention(name, counted, of_module(module, args, kwargs))

    def _watch_scores(self, name: str, module: nn.Module, counted: Pass, args: Args, kwargs: Kwargs) -> None:
        self._modes[module] = Scores(partial(self._add_attention, name, counted))

    def _end_scores(self, name: str, module: nn.Module, counted: Pass, args: Args, kwargs: Kwargs, out: Any) -> None:
        mode = self._modes[module]
        if isinstance(mode, Scores) and (mode.failed or not mode.seen):
            raise mode.failed or LookupError(_NO_LOGITS)

    def _add_attention(self, name: str, counted: Pass, logits: torch.Tensor) -> None:
        logits = logits.detach()
        self._add(name, "attention_logits", seen_logits(logits), counted.order, attention_sums(logits))

    def _attach_router(self, name: str, router: Router) -> None:
        begin, end = partial(self._watch_choice, name, router), partial(self._end_choice, name, router)
        self._hook(router.chooser, name, _LOGITS, begin, end)
        if router.module is not router.chooser:
            self._hook(router.module, name, _LOGITS, _nothing, partial(self._take_logits, name, router))

    def _watch_choice(self, name: str, router: Router, counted: Pass, args: Args, kwargs: Kwargs) -> None:
        inside = router.module is router.chooser
        logits = partial(self._add_logits, name, router, counted) if inside else None
        self._modes[router.chooser] = Choice(router.experts, logits, ends=not inside)

    def _take_logits(self, name: str, router: Router, counted: Pass, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._add_logits(name, router, counted, out[0] if isinstance(out, tuple) else out)

    def _add_logits(self, name: str, router: Router, counted: Pass, logits: torch.Tensor) -> None:
        logits = logits.detach()
        self._add(name, "router_logits", logits, counted.order, router_sums(router.experts, logits))

    def _end_choice(self, name: str, router: Router, counted: Pass, args: Args, kwargs: Kwargs, out: Any) -> None:
        mode, operand = self._modes[router.chooser], self._operands.get((name, *_LOGITS))
        if operand is None or not isinstance(mode, Choice):
            return
        if mode.failed or not (operand.calls or operand.copies):
            raise mode.failed or LookupError(_NO_LOGITS)
        if operand.calls:
            with OperandGuard(self._on_fault, name, "router_logits", False):
                operand.add_further(load_sums(router, mode.chosen, out))


def _is_of_megatron(module: nn.Module) -> bool:
    return type(module).__name__ == "DotProductAttention" and type(module).__module__.startswith("megatron.core.")


def _nothing(*_: Any) -> None:
    """Nothing is to be done at this point of a forward."""

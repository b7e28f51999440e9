"""Observe norms, routers and attentions in one sampled step."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...capture.attention import is_attention
from ...capture.backends import parallel
from ...capture.backends.base import Args, Kwargs
from ...capture.dispatcher import EventDispatcher, ForwardPass
from ...capture.gemms import Gemm
from ...capture.operands import MEASURED, NO_GEMM, OperandAccumulator
from ...capture.scan import ScannedModule, list_inner_module_ids
from ...core.error_guard import Fault, OperandGuard
from ...core.keys import ACTIVATIONS, Key
from .attention_logits import AttentionWatcher, compute_attention_logits, sum_attention_entropies, zero_masked_logits
from .routers import Router, RouterWatcher, find_routers, sum_expert_loads, sum_router_entropies

#: norms of queries and keys: each tensor-parallel rank has its own heads
_OF_HEADS = re.compile(r"(^|\.)[qk]_?(layer)?_?norm\Z")


@dataclass(frozen=True)
class ObservedActivation:
    """A module whose activations are observed."""

    gemm: Gemm
    roles: Sequence[str]
    router: Router | None = None

    @property
    def is_duplicate(self) -> bool:
        """True if another rank counts the activations of this module."""
        if "attention_logits" in self.roles or _OF_HEADS.search(self.gemm.name):
            return False
        return bool(parallel.is_duplicate_operand(self.gemm.module, "input"))


def find_observed_activations(
    scanned: Sequence[ScannedModule], kinds: Collection[str], scores: Collection[int]
) -> tuple[list[ObservedActivation], list[str]]:
    """Return the modules whose activations to observe, and the names of such modules inside torch.compile.

    Args:
        kinds: kinds of activations, as in the option `activations`.
        scores: ids of modules that compute attention scores.
    """
    roles = {role for kind in kinds for role in ACTIVATIONS[kind]}
    left_out = {id(one.module) for one in scanned if one.compiled}
    sites: list[ObservedActivation] = []
    compiled: list[str] = []
    # Hooks do not run in scripted modules.
    scanned = [one for one in scanned if not isinstance(one.module, torch.jit.ScriptModule)]
    for _, of_root in groupby(scanned, key=lambda one: id(one.root)):
        for one, found, router in _found(list(of_root), scores):
            mine = [role for role in found if role in roles]
            if mine and id(one.module) in left_out:
                compiled.append(one.global_name)
            elif mine:
                sites.append(ObservedActivation(Gemm(one.global_name, one.module, NO_GEMM), mine, router))
    return sites, compiled


def _found(
    scanned: Sequence[ScannedModule], scores: Collection[int]
) -> Iterator[tuple[ScannedModule, Sequence[str], Router | None]]:
    for one, router in find_routers(scanned):
        yield one, ("router_logits",), router
    inner = {key for one in scanned if is_attention(one.module) for key in list_inner_module_ids(one.module)}
    for one in scanned:
        if id(one.module) in inner:
            continue
        if found := list_norm_roles(one.module):
            yield one, found, None
        elif id(one.module) in scores:
            yield one, ("attention_logits",), None


_LOGITS = ("router_logits",)
_NO_LOGITS = "no torch operator received them"
_Begin = Callable[[ForwardPass, Args, Kwargs], None]
_End = Callable[[ForwardPass, Args, Kwargs, Any], None]


class ActivationCapture:
    """Observes activations, in the forward calls in which operands are measured too."""

    def __init__(
        self,
        sites: Sequence[ObservedActivation],
        operands: Mapping[Key, OperandAccumulator],
        on_fault: Fault,
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            operands: receive the activations, by (name, role).
            on_fault: called after a fault.
            dispatcher: dispatcher of the step.
        """
        self._sites, self._operands, self._on_fault, self._dispatcher = sites, operands, on_fault, dispatcher

    def subscribe(self) -> None:
        """Observe calls from now on."""
        for site in self._sites:
            module, name, roles = site.gemm.module, site.gemm.name, site.roles
            if site.router is not None:
                self._watch_router(name, site.router)
            elif "attention_logits" not in roles:
                self._watch(module, name, roles, partial(self._before_norm, name), partial(self._after_norm, name))
            elif is_attention(module) or _is_of_megatron(module):
                self._watch(module, name, roles, partial(self._read_arguments, name, module), _nothing)
            else:
                self._watch(module, name, roles, partial(self._watch_scores, name), self._end_scores)

    def _watch(self, module: nn.Module, name: str, roles: Sequence[str], begin: _Begin, end: _End) -> None:
        """Call `begin` and `end` around each forward that counts.

        Args:
            roles: roles that the two functions observe.
            begin: called at the beginning of each forward that counts.
            end: called after the forward has returned.
        """

        def entered(call: ForwardPass, args: Args, kwargs: Kwargs) -> None:
            if call.counts:
                begin(call, args, kwargs)

        def left(call: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
            if call.counts:
                with OperandGuard(self._on_fault, name, roles[-1], True):
                    end(call, args, kwargs, out)
                call.kept = None

        guard = partial(OperandGuard, self._on_fault, name, roles[0], True)
        self._dispatcher.watch_calls(module, guard, entered, left)

    def _add(self, name: str, role: str, x: torch.Tensor, order: int, further: torch.Tensor) -> None:
        operand = self._operands.get((name, role))
        if operand is not None:
            calls = operand.calls
            operand.add_tensor(x if x.dtype in MEASURED else x.float(), order)
            if operand.calls > calls:  # otherwise another rank counts the tensor
                operand.add_call_sums(further)

    def _before_norm(self, name: str, counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        x = find_norm_input(args, kwargs).detach()
        self._add(name, "norm_input", x, counted.order, sum_channel_squares(x))

    def _after_norm(self, name: str, counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (name, "norm_output") in self._operands:
            y = find_norm_output(out, find_norm_input(args, kwargs)).detach()
            self._add(name, "norm_output", y, next(self._dispatcher.order), sum_channel_squares(y))

    def _read_arguments(self, name: str, module: nn.Module, counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        self._add_attention(name, counted, compute_attention_logits(module, args, kwargs))

    def _watch_scores(self, name: str, counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        counted.kept = AttentionWatcher(partial(self._add_attention, name, counted))
        counted.enter_mode(counted.kept)

    def _end_scores(self, counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        mode = counted.kept
        if isinstance(mode, AttentionWatcher) and (mode.failed or not mode.seen):
            raise mode.failed or LookupError(_NO_LOGITS)

    def _add_attention(self, name: str, counted: ForwardPass, logits: torch.Tensor) -> None:
        logits = logits.detach()
        self._add(name, "attention_logits", zero_masked_logits(logits), counted.order, sum_attention_entropies(logits))

    def _watch_router(self, name: str, router: Router) -> None:
        begin, end = partial(self._watch_choice, name, router), partial(self._end_choice, name, router)
        self._watch(router.chooser, name, _LOGITS, begin, end)
        if router.module is not router.chooser:
            self._watch(router.module, name, _LOGITS, _nothing, partial(self._take_logits, name, router))

    def _watch_choice(self, name: str, router: Router, counted: ForwardPass, args: Args, kwargs: Kwargs) -> None:
        inside = router.module is router.chooser
        logits = partial(self._add_logits, name, router, counted) if inside else None
        counted.kept = RouterWatcher(router.experts, logits, ends=not inside)
        counted.enter_mode(counted.kept)

    def _take_logits(self, name: str, router: Router, counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._add_logits(name, router, counted, out[0] if isinstance(out, tuple) else out)

    def _add_logits(self, name: str, router: Router, counted: ForwardPass, logits: torch.Tensor) -> None:
        logits = logits.detach()
        self._add(name, "router_logits", logits, counted.order, sum_router_entropies(router.experts, logits))

    def _end_choice(self, name: str, router: Router, counted: ForwardPass, args: Args, kwargs: Kwargs, out: Any) -> None:
        mode, operand = counted.kept, self._operands.get((name, *_LOGITS))
        if operand is None or not isinstance(mode, RouterWatcher):
            return
        if mode.failed or not (operand.calls or operand.copies):
            raise mode.failed or LookupError(_NO_LOGITS)
        if operand.calls:
            with OperandGuard(self._on_fault, name, "router_logits", False):
                operand.add_call_sums(sum_expert_loads(router, mode.chosen, out))


def _is_of_megatron(module: nn.Module) -> bool:
    return type(module).__name__ == "DotProductAttention" and type(module).__module__.startswith("megatron.core.")


def _nothing(*_: Any) -> None:
    """Do nothing at this point of a forward."""


# Norms -----------------------------------------------------------------------------------------------------------------


#: end of the class names of norms that normalize over the channels of each token
_NORM = re.compile(r"(?<!batch)(?<!group)(?<!instance)norm\Z")
#: Transformer Engine's layers that begin with a norm
_FUSED = ("LayerNormLinear", "LayerNormMLP")


def list_norm_roles(module: nn.Module) -> tuple[str, ...]:
    """Return the roles of a norm to observe, or an empty tuple for other modules.

    For a norm inside a GEMM module, we observe only the input, because the output of the norm is the GEMM's X.
    """
    if any(base.__name__ in _FUSED for base in type(module).__mro__):
        return ("norm_input",)
    is_leaf = not any(True for _ in module.children())
    has_no_matrix = all(p is None or (not is_lazy(p) and p.dim() <= 1) for p in module._parameters.values())
    named = _NORM.search(type(module).__name__.lower())
    return ("norm_input", "norm_output") if named and is_leaf and has_no_matrix else ()


def find_norm_input(args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Return the input of a norm.

    Raises:
        LookupError: the norm is called without a tensor.
    """
    return _first((*args, *kwargs.values()), "it is called without a floating-point tensor")


def find_norm_output(out: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a norm.

    Raises:
        LookupError: the output does not have the shape of the input.
    """
    found = _first(out if isinstance(out, tuple) else (out,), "it returns no floating-point tensor")
    if found.shape != x.shape:
        raise LookupError(f"its output has shape {tuple(found.shape)}, and its input {tuple(x.shape)}")
    return found


def sum_channel_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the number of rows and each channel's sum of squares, float64 [1 + C]. Channels are the last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64)
    return torch.cat([norms.new_tensor([len(rows)]), norms.square()])


def _first(values: Any, otherwise: str) -> torch.Tensor:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0:
            return value
    raise LookupError(otherwise)

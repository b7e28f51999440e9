"""Observe gradients of weights over all micro-batches and ranks, before other code unscales, clips or uses them.

A hook on each weight notes when a backward pass reaches the weight. We pass on the gradient after the pass and the engine's
own callbacks. After a later micro-batch, we pass on the gradient again, so that the last one in a step is complete. We read
gradients at these times:

DDP       after the pass, when DDP's callback has summed the gradient over ranks. Under `no_sync`, DDP computes no such sum
FSDP2     after the pass, like DDP. Each rank has a part of the gradient
Megatron  when `finish_grad_sync` of Megatron's DDP returns, from `main_grad`
If an optimizer steps inside backward: when the gradient arrives, because it no longer exists at the end of the pass

We leave out weights whose gradients are summed over ranks in another way, because we could mistake a rank's summand for the
whole gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.error_guard import leave_dispatch_modes, restore_dispatch_modes
from .backends.base import read_raw_weight
from .backends.in_forward import find_parameter_name
from .backends.parallel import count_ranks_summing_gradient, find_megatron_parallel_state, is_duplicate_master_weight
from .dispatcher import EventDispatcher
from .gemms import Gemm
from .optimizer_weights import find_gradient_buffers, is_optimizer_state_sharded
from .patching import watch_function_calls
from .scan import ScannedModule
from .tensors import is_dtensor

_LOOKING = "while looking at gradients of weights"
#: attributes of weights whose gradients Megatron adds up once more after `finish_grad_sync`
ADDED_LATER = ("shared_embedding", "average_gradients_across_tp_domain")
_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")


class WeightGradient(NamedTuple):
    """A gradient at the current point of the step."""

    #: names of the GEMMs that multiply the weight
    names: Sequence[str]
    #: this rank's whole gradient, DTensor or flat part. None if the gradient that was passed on before is not complete
    x: torch.Tensor | None


@dataclass(eq=False)
class WatchedWeight:
    """A weight whose gradient is observed."""

    names: list[str]
    module: nn.Module
    #: module that contains the weight, and the name of the weight in this module
    holder: nn.Module
    key: str
    #: tensor with the gradient: the weight or, under FSDP2, its sharded parameter
    parameter: Any
    #: returns whether this rank counts a tensor with the weight's layout
    counts: Callable[[torch.Tensor], bool]
    is_sharded: bool = False
    #: whether the module adds to `main_grad`, and autograd receives no gradient
    is_fused: bool = False
    #: whether other ranks have summands that DDP must add up
    needs_ddp: bool = False
    #: whether DDP adds up the summands in the next pass
    is_synced: bool = False
    #: Megatron's buffer, and its DDP
    buffer: Any = None
    reducer: Any = None
    #: version of the gradient when the pass reached the weight, or None if the weight had no gradient
    _version: int | None = None
    _hooked: set[int] = field(default_factory=set)

    @property
    def expects_gradient(self) -> bool:
        """True if this rank should count a part of the gradient."""
        if self.buffer is not None and _is_distributed(self.buffer):
            return not is_duplicate_master_weight(self.module) and _part_of_bucket(self.buffer, self.parameter) is not None
        return self.counts(self.parameter)

    def counts_gradient(self, x: torch.Tensor) -> bool:
        """Return True if no other rank counts this rank's gradient."""
        return self.expects_gradient if self.buffer is not None else self.counts(x)


class WeightGradientCapture:
    """An observer of weight gradients in one sampled step on this rank."""

    def __init__(
        self,
        gemms: Sequence[Gemm],
        scanned: Sequence[ScannedModule],
        ranks: int,
        counts: Callable[[Gemm], Callable[[torch.Tensor], bool]],
        guard: Callable[[str], AbstractContextManager[None]],
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            gemms: the GEMMs of these weights.
            scanned: the modules of the model in this step.
            ranks: number of ranks that have parts of the same tensors.
            counts: returns, for a GEMM, a function that decides if this rank counts a tensor with the weight's layout.
            guard: returns a context that keeps an exception out of the training loop.
            dispatcher: dispatcher of the step.
        """
        self._guard, self._dispatcher, self._ranks = partial(guard, _LOOKING), dispatcher, ranks
        self._gemms, self._scanned, self._counts = gemms, scanned, counts
        self._calls: list[Callable[[Sequence[WeightGradient]], None]] = []
        self.weights: Sequence[WatchedWeight] = ()
        #: weights that a backward pass has reached since the last time we passed on gradients, and in total
        self._arrived: list[WatchedWeight] = []
        self._of_ranks: dict[int, WatchedWeight] = {}
        self._passes: set[int] = set()
        self._ddp: dict[int, set[int]] = {}

    def add_watcher(self, call: Callable[[Sequence[WeightGradient]], None]) -> Sequence[WatchedWeight]:
        """Call `call` each time we pass on gradients. Return the weights that are watched."""
        if not self._calls:
            self.weights = self._find()
        self._calls.append(call)
        return self.weights

    def subscribe(self) -> None:
        """Observe gradients from now on, if there are watchers."""
        for one in self.weights:
            if one.buffer is None and not one.is_sharded:
                self._hook(one, one.parameter)
            if one.is_sharded or one.needs_ddp:
                self._dispatcher.watch_before_forward(one.module, self._guard, partial(self._before_forward, one))
        for module in {id(one.reducer): one.reducer for one in self.weights if one.reducer is not None}.values():
            watcher = partial(self._after_reduction, module)
            self._dispatcher.call_after_step(watch_function_calls(module, "finish_grad_sync", _call_first, watcher))

    def _find(self) -> list[WatchedWeight]:
        sharded, buffers = FSDP2Parameters(self._scanned), find_gradient_buffers(self._scanned)
        buffers = [(module, buffer) for module, buffer in buffers if hasattr(module, "finish_grad_sync")]
        self._sharded = sharded
        found: dict[int, WatchedWeight] = {}
        for gemm in self._gemms:
            if (place := _place_of(gemm)) is None:
                continue
            own = sharded.find_parameter(*place)
            weight: Any = read_raw_weight(*place) if own is None else own
            if id(weight) in found:
                found[id(weight)].names.append(gemm.name)
            elif weight is not None and weight.requires_grad and weight.is_leaf and weight.dim() > 1:
                one = WatchedWeight([gemm.name], gemm.module, *place, weight, self._counts(gemm), own is not None)
                one.is_fused = adds_to_main_grad(gemm.module, weight)
                if self._is_known(one, buffers):
                    found[id(weight)] = one
        return list(found.values())

    def _is_known(self, one: WatchedWeight, buffers: Sequence[tuple[Any, Any]]) -> bool:
        """Return True if we know how ranks add up the gradient."""
        weight, of_megatron = one.parameter, count_ranks_summing_gradient(one.module)
        ranks = self._ranks if of_megatron is None else of_megatron
        if is_optimizer_state_sharded(weight):
            return False
        if is_dtensor(weight):
            return find_megatron_parallel_state() is None and bool(weight.device_mesh.size() == ranks)
        for module, buffer in buffers:
            if weight in buffer.param_index_map:
                one.buffer, one.reducer = buffer, module
                later = any(getattr(weight, name, False) for name in ADDED_LATER)
                return not later and bool(buffer.data_parallel_group.size() == ranks)
        one.needs_ddp = ranks > 1
        return not _is_delayed(one.module) and not (one.is_fused and one.needs_ddp)

    def _hook(self, one: WatchedWeight, weight: Any) -> None:
        if id(weight) not in one._hooked:
            one._hooked.add(id(weight))
            self._dispatcher.watch_gradient(weight, self._guard, partial(self._arrive, one))

    def _before_forward(self, one: WatchedWeight, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        if one.is_sharded:
            gathered: Any = read_raw_weight(one.holder, one.key)
            if gathered is not None and gathered.is_leaf and gathered.requires_grad and not is_dtensor(gathered):
                self._hook(one, gathered)
            return
        ddp = find_active_ddp()
        if ddp is not None:
            own = self._ddp.setdefault(id(ddp), {id(p) for p in ddp._module_parameters})
            ranks = count_ranks_summing_gradient(one.module) or self._ranks
            is_all = id(one.parameter) in own and ddp.process_group.size() == ranks
            one.is_synced = is_all and bool(ddp.require_backward_grad_sync)

    def _arrive(self, one: WatchedWeight, grad: torch.Tensor | None) -> None:
        kept = None if one.is_sharded else one.parameter.grad
        one._version = None if kept is None else kept._version
        of_ranks = one.is_sharded or one.needs_ddp
        if grad is not None and not of_ranks and getattr(one.parameter, "_post_accumulate_grad_hooks", None):
            # Another hook may step the optimizer and clear the gradient before the pass ends.
            self._hand_over([WeightGradient(one.names, grad if kept is None else None)])
        self._arrived.append(one)
        if of_ranks:
            self._of_ranks[id(one)] = one
        # A reentrant checkpoint runs its own pass within another.
        if (task := torch._C._current_graph_task_id()) not in self._passes:
            self._passes.add(task)
            self._dispatcher.call_after_backward(self._guard, self._after_backward)

    def _after_backward(self) -> None:
        """Pass on gradients of weights that this pass reached, and earlier gradients that may now be summed over ranks."""
        arrived, self._arrived = {id(one): one for one in self._arrived}, []
        found = [found for one in (arrived | self._of_ranks).values() if (found := self._look(one)) is not None]
        self._hand_over(found)

    def _look(self, one: WatchedWeight) -> WeightGradient | None:
        grad = one.parameter.grad
        if one.is_fused:
            return WeightGradient(one.names, one.parameter.main_grad)
        if one.is_sharded:
            return WeightGradient(one.names, grad if self._sharded.will_reduce_gradient(one.holder, one.key) else None)
        if grad is None or grad._version == one._version:
            return None  # the pass added nothing to `.grad`, as in torch.autograd.grad

        return WeightGradient(one.names, None if one.needs_ddp and not one.is_synced else grad)

    def _after_reduction(self, module: Any, _: Any) -> None:
        """Pass on the gradients that one of Megatron's DDP modules has summed over ranks."""
        with self._guard():
            found = list[WeightGradient]()
            for one in [one for one in self.weights if one.reducer is module]:
                flat = one.parameter.main_grad.detach().reshape(-1)
                if not _is_distributed(one.buffer):
                    found.append(WeightGradient(one.names, one.parameter.main_grad))
                elif (mine := _part_of_bucket(one.buffer, one.parameter)) is not None:
                    found.append(WeightGradient(one.names, flat[mine]))
            self._hand_over(found)

    def _hand_over(self, found: Sequence[WeightGradient]) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        modes = leave_dispatch_modes()
        try:
            with torch.no_grad():
                usable = [one if _is_usable(one.x) else one._replace(x=None) for one in found]
                for call in self._calls:
                    call(usable)
        finally:
            restore_dispatch_modes(modes)


def _place_of(gemm: Gemm) -> tuple[nn.Module, str] | None:
    """Return the module that contains the parameter of a GEMM, and the name of the parameter in this module."""
    if gemm.backend.in_forward:
        path, _, key = find_parameter_name(gemm.module, gemm.part).rpartition(".")
        return gemm.module.get_submodule(path), key
    if not gemm.part or gemm.part.isdigit():
        return gemm.module, f"weight{gemm.part}"
    return gemm.module, f"{gemm.part}_weight"  # Transformer Engine's LayerNormMLP


def _is_usable(x: torch.Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and x.layout == torch.strided


def _is_delayed(module: Any) -> bool:
    """Return True if dW is computed after the backward pass."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def adds_to_main_grad(module: nn.Module, weight: Any = None) -> bool:
    """Return True if a GEMM adds the gradient of its weight to `main_grad`, so that autograd receives no gradient.

    Args:
        weight: the weight, by default the module's `weight`.
    """
    held = read_raw_weight(module) if weight is None else weight
    return hasattr(held, "main_grad") and any(getattr(module, name, False) for name in _FUSED)


def _is_distributed(buffer: Any) -> bool:
    return bool(buffer.ddp_config.use_distributed_optimizer)


def _part_of_bucket(buffer: Any, parameter: Any) -> slice | None:
    """Return the slice of a parameter's gradient that this rank has reduced. Ranks have equal parts of each bucket."""
    begin, end, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    first = bucket.offset + group.rank() * size
    low, high = max(begin, first), min(end, first + size)
    return slice(low - begin, high - begin) if low < high else None


def _call_first(original: Callable[..., Any], tell: Callable[[Any], None], *arguments: Any, **options: Any) -> Any:
    result = original(*arguments, **options)
    tell(result)
    return result


# Sharded parameters and DDP ---------------------------------------------------------------------------------------------


def find_active_ddp() -> Any:
    """Return torch's DistributedDataParallel module whose forward is running, or None."""
    of: Any = sys.modules.get("torch.nn.parallel.distributed")
    return getattr(getattr(of, "DistributedDataParallel", None), "_active_ddp_module", None)


class FSDP2Parameters:
    """The sharded parameters of FSDP2. Each replaces a weight of a module while the weight is not gathered."""

    def __init__(self, scanned: Iterable[ScannedModule]) -> None:
        self._of: dict[tuple[int, str], tuple[Any, Any]] = {}
        for group in [group for one in scanned for group in _groups_of(one.module)]:
            for one in group.fsdp_params:
                info = one._module_info
                self._of[id(info.module), info.param_name] = one, group

    def find_fsdp_states(self, module: nn.Module, name: str) -> tuple[Any, Any]:
        """Return FSDP2's states of a parameter, and of the group of parameters that are gathered together with it."""
        return self._of[id(module), name]

    def find_parameter(self, module: nn.Module, name: str) -> Any:
        """Return the sharded parameter, a DTensor, or None if the parameter is not sharded."""
        found = self._of.get((id(module), name))
        return found and found[0].sharded_param

    def has_gradient(self, module: nn.Module, name: str) -> bool:
        """Return True if the parameter has a gradient from earlier backward passes."""
        one, _ = self._of[id(module), name]
        own = getattr(one, "_unsharded_param", None)
        kept = (one.sharded_param.grad, one.unsharded_accumulated_grad, None if own is None else own.grad)
        return any(grad is not None for grad in kept)

    def will_reduce_gradient(self, module: nn.Module, name: str) -> bool:
        """Return True if the next backward pass sums the parameter's gradient over all ranks."""
        _, group = self._of[id(module), name]
        return bool(group.reduce_grads and group.all_reduce_grads)


def _groups_of(module: nn.Module) -> Sequence[Any]:
    if not hasattr(type(module), "_get_fsdp_state"):  # a miss on the module would search its parameters
        return ()
    get: Any = module._get_fsdp_state
    state = get()
    group = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return getattr(state, "_fsdp_param_groups", () if group is None else (group,))

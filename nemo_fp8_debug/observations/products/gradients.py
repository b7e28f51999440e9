"""Copy a few values of weight gradients, before and after they are summed over micro-batches and ranks.

A hook on the parameter receives the gradient that each backward pass adds. We read the sum after the backward pass and the
engine's own callbacks, before clipping. If the sum is in Megatron's buffers, we read it when an optimizer begins to step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...capture.backends.parallel import count_ranks_summing_gradient, find_replica_part_index
from ...capture.dispatcher import EventDispatcher
from ...capture.gemms import Gemm
from ...capture.optimizer_weights import (
    find_bucket_part_start,
    find_gemm_parameter,
    find_gradient_buffers,
    is_optimizer_state_sharded,
)
from ...capture.scan import ScannedModule
from ...capture.tensors import is_dtensor, take_local_part
from ...capture.weight_gradients import ADDED_LATER, FSDP2Parameters, adds_to_main_grad, find_active_ddp
from ...numerics.gemm_error import sample_indices
from .gradient_parts import GradientOfRank, compute_summation_error_bound
from .verification import NOT_REDUCED, OTHER_REDUCTION, PARTS_MISSING
from .verification import REDUCED_ROWS as ROWS


@dataclass(frozen=True)
class Reducer:
    """How ranks add up the gradient of one weight."""

    #: number of ranks with summands
    ranks: int = 1
    #: factor that multiplies the sum
    factor: float = 1.0
    #: whether nothing else multiplies the gradient before we read it
    known: bool = True
    #: dtype of the sum over ranks, or None for the gradient's dtype
    dtype: torch.dtype | None = None
    #: why the sum cannot be checked, an index into `REASONS`
    reason: int = 0


ALONE = Reducer()
OTHER = Reducer(reason=OTHER_REDUCTION)


def of_ddp(weight: Any) -> Reducer | None:
    """Return the reducer of the torch DistributedDataParallel whose forward runs, or None if the weight is not in it."""
    active = find_active_ddp()
    if active is None or not any(p is weight for p in active._module_parameters):
        return None
    if active._comm_hooks or active.mixed_precision is not None:
        return OTHER
    ranks = active.process_group.size()
    return Reducer(ranks, 1 / ranks, reason=0 if active.require_backward_grad_sync else NOT_REDUCED)


def of_fsdp(sharded: FSDP2Parameters, module: nn.Module, name: str) -> Reducer:
    """Return the reducer of a parameter that FSDP2 has sharded."""
    one, group = sharded.find_fsdp_states(module, name)
    placements = one.sharded_param.placements
    of_rows = all(p.is_replicate() for p in placements[:-1]) and placements[-1].is_shard(0)
    hooked = getattr(group, "_all_reduce_hook", None) is not None
    if hooked or not of_rows or type(placements[-1]).__name__ != "Shard" or one.sharded_param.ndim != 2:
        return OTHER
    ranks = one.sharded_param.device_mesh.size()
    if not sharded.will_reduce_gradient(module, name):
        return Reducer(ranks, reason=NOT_REDUCED)
    return Reducer(ranks, 1 / (group.gradient_divide_factor or ranks), dtype=group._reduce_dtype)


def of_megatron(module: nn.Module, weight: Any, buffers: Sequence[Any]) -> tuple[Reducer, slice | None]:
    """Return the reducer of a weight with a `main_grad`, and the slice of its reduced values on this rank, or None.

    Megatron may divide all gradients by the tokens of a step, and clips them in place.

    Args:
        buffers: the buffers that `find_gradient_buffers` returned.
    """
    ranks = count_ranks_summing_gradient(module)
    shared = any(getattr(weight, name, False) for name in ADDED_LATER)
    if ranks is None or shared:
        return OTHER, None
    for buffer in buffers:
        if weight in buffer.param_index_map:
            bucket = buffer.buckets[buffer.param_index_map[weight][2]]
            factor = bucket.gradient_scaling_factor / (ranks if buffer.ddp_config.average_in_collective else 1)
            reducer = Reducer(ranks, factor, known=False)
            if not buffer.ddp_config.use_distributed_optimizer:
                return reducer, slice(0, weight.numel())
            main = getattr(weight, "main_param", None)
            if main is None or not main.numel():
                return reducer, None
            begin = find_bucket_part_start(buffer, weight)
            return reducer, slice(begin, begin + main.numel())
    return OTHER, None


def is_alone() -> bool:
    """Return True if there is only one process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


_LOOKING = "while comparing reduced gradients"
#: number of roundings in addition to roundings of sums: averaging before and after sums, dividing by tokens, and clipping
_SCALINGS = 4


@dataclass
class _Gradient:
    """The gradient of one weight."""

    gemm: Gemm
    #: the weight that `find_gemm_parameter` returned; under FSDP2 the gathered weight
    weight: Any
    #: whether this rank has its own summands, and whether it keeps a tensor in the layout of the weight
    adds: bool
    keeps: Callable[[torch.Tensor], bool]
    shape: tuple[int, int]
    #: sampled step, which determines the rows and columns to compare
    step: int
    reducer: Reducer | None = None
    #: [k, l] each: summands of this rank, and the reduced gradient
    summands: list[torch.Tensor] = field(default_factory=list)
    reduced: torch.Tensor | None = None
    #: which values of the reduced gradient this rank keeps, or None if it keeps all values or none
    held: torch.Tensor | None = None
    passes: int = 0

    @property
    def name(self) -> str:
        """Name of the parameter in its module."""
        return f"weight{self.gemm.part}"

    def block(self, m: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows and columns to compare."""
        return m.detach()[_places(self.shape, self.step, m.device)]

    def add(self, anew: bool, *blocks: torch.Tensor) -> None:
        """Add summands. If `anew` is set, they replace earlier summands."""
        self.summands = [*blocks] if anew else [*self.summands, *blocks]

    def keep_part(self, flat: torch.Tensor, begin: int) -> None:
        """Copy the values to compare that are in this part of the reduced gradient, which starts at index `begin`."""
        rows, columns = _places(self.shape, self.step, flat.device)
        at = rows * self.shape[1] + columns - begin
        self.held = (at >= 0) & (at < flat.numel())
        if flat.numel():
            self.reduced = torch.where(self.held, flat[at.clamp(0, flat.numel() - 1)], 0)


@functools.lru_cache(1024)
def _places(shape: tuple[int, int], step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and columns to compare, int64 [k, 1] and [l]. Do not write to the results."""
    rows, columns = (sample_indices(n, ROWS, device, step, bool(i)) for i, n in enumerate(shape))
    return rows[:, None], columns


class ReducedGradients:
    """Gradients of one sampled step on this rank."""

    def __init__(
        self,
        gemms: Sequence[Gemm],
        scanned: Sequence[ScannedModule],
        step: int,
        keeps: Callable[[Gemm], Callable[[torch.Tensor], bool]],
        guard: Callable[[str], AbstractContextManager[None]],
        dispatcher: EventDispatcher,
    ) -> None:
        """
        Args:
            gemms: the GEMMs of these weights.
            scanned: the modules of the model in this step.
            step: sampled step, the same on all ranks, which determines the values to compare.
            keeps: returns for a GEMM a test whether this rank counts a tensor in its weight's layout.
            guard: returns a context that keeps an exception out of the training loop.
            dispatcher: dispatcher of the step.
        """
        self._buffers, self._sharded = [buffer for _, buffer in find_gradient_buffers(scanned)], FSDP2Parameters(scanned)
        self._gradients: dict[str, _Gradient] = {}
        for gemm in gemms:
            weight = find_gemm_parameter(gemm)
            if weight is not None and weight.dim() == 2 and weight.numel() and weight.requires_grad:
                copied = [gemm.backend.copied(gemm.module, role) for role in ("input", "grad_output")]
                shape = (weight.shape[0], weight.shape[1])
                self._gradients[gemm.name] = _Gradient(gemm, weight, not all(copied), keeps(gemm), shape, step)
        self._dispatcher, self._guarded = dispatcher, partial(guard, _LOOKING)
        self._hooked: set[int] = set()
        self._queued = self._stepped = False

    def subscribe(self) -> None:
        """Observe gradients from now on."""
        self._dispatcher.watch_optimizer(self._guarded, self._before_step)
        for one in self._gradients.values():
            module = one.gemm.module
            self._dispatcher.watch_before_forward(module, self._guarded, partial(self._before_forward, one))
            if self._sharded.find_parameter(module, one.name) is None:
                self._watch(one)

    def _watch(self, one: _Gradient) -> None:
        weight = one.weight
        if weight.is_leaf and weight.requires_grad and not is_dtensor(weight) and id(weight) not in self._hooked:
            self._hooked.add(id(weight))
            of = [other for other in self._gradients.values() if other.weight is weight]
            self._dispatcher.watch_gradient(weight, self._guarded, partial(self._see, of))

    def _before_forward(self, one: _Gradient, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        if self._sharded.find_parameter(one.gemm.module, one.name) is not None:
            one.weight = find_gemm_parameter(one.gemm)
            self._watch(one)
        one.reducer = self._reducer(one)

    def _reducer(self, one: _Gradient) -> Reducer:
        weight, module = one.weight, one.gemm.module
        if getattr(weight, "_post_accumulate_grad_hooks", None) or is_optimizer_state_sharded(weight):
            return OTHER
        if hasattr(weight, "main_grad"):
            return of_megatron(module, weight, self._buffers)[0]
        if self._sharded.find_parameter(module, one.name) is not None:
            return of_fsdp(self._sharded, module, one.name)
        if is_dtensor(weight):
            return OTHER
        return of_ddp(weight) or (ALONE if is_alone() else OTHER)

    def _see(self, of: Sequence[_Gradient], grad: torch.Tensor | None) -> None:
        """Copy the gradient of a backward pass before it is accumulated."""
        if self._stepped:
            return
        for one in of:
            self._see_summand(one, grad)
        if not self._queued:
            self._queued = True
            self._dispatcher.call_after_backward(self._guarded, self._after_backward)

    def _see_summand(self, one: _Gradient, grad: torch.Tensor | None) -> None:
        weight = one.weight
        main = getattr(weight, "main_grad", None)
        if main is not None and adds_to_main_grad(one.gemm.module):  # the GEMM added dW itself, so autograd receives none
            one.add(True, one.block(main))
        elif grad is not None and not is_dtensor(grad):
            own = one.block(grad)
            if main is not None:
                one.add(False, own, *([] if one.passes else [one.block(main)]))
            elif self._sharded.find_parameter(one.gemm.module, one.name) is not None:
                earlier = self._sharded.has_gradient(one.gemm.module, one.name)
                if earlier and not one.passes:
                    one.reducer = Reducer(reason=PARTS_MISSING)
                one.add(not earlier, own)
            else:
                one.add(True, own, *([] if weight.grad is None else [one.block(weight.grad)]))
        one.passes += 1

    def _after_backward(self) -> None:
        self._queued = False
        for one in self._gradients.values():
            if not self._stepped and not hasattr(one.weight, "main_grad"):
                self._see_reduced(one)

    def _see_reduced(self, one: _Gradient) -> None:
        parameter = self._sharded.find_parameter(one.gemm.module, one.name)
        grad = (one.weight if parameter is None else parameter).grad
        if grad is None or not one.keeps(grad):
            return
        if is_dtensor(grad):  # torch splits the gradient by rows
            size, rank = grad.device_mesh.size(-1), grad.device_mesh.get_coordinate()[-1]
            one.keep_part(take_local_part(grad).reshape(-1), -(-one.shape[0] // size) * rank * one.shape[1])
        else:
            one.reduced = one.block(grad)

    def _before_step(self, *_: Any) -> None:
        """Read gradients when an optimizer begins. Anything later belongs to another step."""
        if self._stepped:
            return
        self._stepped = True
        for one in self._gradients.values():
            main = getattr(one.weight, "main_grad", None)
            if main is None or is_dtensor(main):
                continue
            one.reducer, held = of_megatron(one.gemm.module, one.weight, self._buffers)
            if held is not None and one.keeps(main):
                one.keep_part(main.detach().reshape(-1)[held], held.start)

    def move_tensors(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by the result of `to`."""
        for one in self._gradients.values():
            one.summands = [to(x) for x in one.summands]
            one.reduced = None if one.reduced is None else to(one.reduced)
            one.held = None if one.held is None else to(one.held)

    def collect_gradients_of_rank(self) -> Mapping[str, GradientOfRank]:
        """Return this rank's parts by layer."""
        return {name: parts for name, one in self._gradients.items() if (parts := _parts(one)) is not None}


def _parts(one: _Gradient) -> GradientOfRank | None:
    """Return this rank's part of the gradient, or None if this rank should have no part."""
    part, reducer = find_replica_part_index(one.gemm.module, "weight_gradient"), one.reducer or OTHER
    seen = one.passes > 0 or hasattr(one.weight, "main_grad")  # experts without tokens have a `main_grad` too
    if part is None or not one.adds or not seen:
        return None
    high, wide = (min(n, ROWS) for n in one.shape)
    none = torch.zeros(high, wide, dtype=torch.float64)
    summands = [x.double() for x in one.summands]
    summand, size = sum(summands, none), sum((x.abs() for x in summands), none)
    reduced = none if one.reduced is None else one.reduced.double()
    held = (none == 0 if one.held is None else one.held) if one.reduced is not None else none > 0
    given = [*one.summands, *([] if one.reduced is None else [one.reduced])]
    dtypes = {x.dtype for x in given} | {reducer.dtype or torch.float32}
    roundings = max(one.passes, 1) * reducer.ranks + _SCALINGS
    bound = compute_summation_error_bound(size, roundings, dtypes, reducer.ranks, reducer.factor)
    return GradientOfRank(
        part=part,
        summand=summand,
        bound=bound,
        reduced=reduced / reducer.factor,
        held=int(held.sum()),
        first=bool(held[0, 0]),
        expected=reducer.ranks,
        passes=one.passes > 0,
        known=reducer.known,
        reason=reducer.reason,
    )

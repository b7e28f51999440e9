"""How a framework adds up gradients over ranks: over how many, in which dtype, and by which factor it averages.

Each is read from what the framework holds. One that is not known here is `OTHER`, and nothing is claimed of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...capture.backends.parallel import gradient_ranks
from ...capture.data_parallel import Sharded, active_ddp
from ...capture.optimizer_weights import begin_of_part
from .verification import NOT_REDUCED, OTHER_REDUCTION


@dataclass(frozen=True)
class Reducer:
    """How the gradient of one weight comes about."""

    #: that have summands
    ranks: int = 1
    #: that their sum is multiplied by
    factor: float = 1.0
    #: whether nothing else multiplies it before it is looked at
    known: bool = True
    #: that ranks add up in; None: that of the gradient
    dtype: torch.dtype | None = None
    #: why nothing can be told, as in `REASONS`
    reason: int = 0


ALONE = Reducer()
OTHER = Reducer(reason=OTHER_REDUCTION)


def of_ddp(weight: Any) -> Reducer | None:
    """Of torch's DistributedDataParallel, in whose forward this is called; None: in none that has the weight."""
    active = active_ddp()
    if active is None or not any(p is weight for p in active._module_parameters):
        return None
    if active._comm_hooks or active.mixed_precision is not None:
        return OTHER
    ranks = active.process_group.size()
    return Reducer(ranks, 1 / ranks, reason=0 if active.require_backward_grad_sync else NOT_REDUCED)


def of_fsdp(sharded: Sharded, module: nn.Module, name: str) -> Reducer:
    """Of a parameter that FSDP2 has sharded."""
    one, group = sharded.find(module, name)
    placements = one.sharded_param.placements
    of_rows = all(p.is_replicate() for p in placements[:-1]) and placements[-1].is_shard(0)
    hooked = getattr(group, "_all_reduce_hook", None) is not None
    if hooked or not of_rows or type(placements[-1]).__name__ != "Shard" or one.sharded_param.ndim != 2:
        return OTHER
    ranks = one.sharded_param.device_mesh.size()
    if not sharded.is_reduced(module, name):
        return Reducer(ranks, reason=NOT_REDUCED)
    return Reducer(ranks, 1 / (group.gradient_divide_factor or ranks), dtype=group._reduce_dtype)


def of_megatron(module: nn.Module, weight: Any, buffers: Sequence[Any]) -> tuple[Reducer, slice | None]:
    """Of a weight with a `main_grad`, and which of its values this rank has reduced; None: it keeps none of them.

    Megatron may divide all gradients by the tokens of a step, and clips them in place.

    Args:
        buffers: as `find_buffers` has them.
    """
    ranks = gradient_ranks(module)
    shared = any(getattr(weight, name, False) for name in ("shared_embedding", "average_gradients_across_tp_domain"))
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
            begin = begin_of_part(buffer, weight)
            return reducer, slice(begin, begin + main.numel())
    return OTHER, None


def is_alone() -> bool:
    """Whether there is one process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1

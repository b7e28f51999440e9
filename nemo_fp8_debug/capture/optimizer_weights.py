"""Find an optimizer's tensors for GEMM weights: master weights of weights stored as codes, and updated parameters.

Megatron's optimizers keep a master weight in the parameter's attribute `main_param`. Megatron's distributed optimizer gives
each rank a part. Other optimizers keep the master weight in their state, where we find it when they step. An optimizer may
update the parameter itself, a float32 copy, a part of a copy, or (in DeepSpeed's ZeRO) a slice of a flat tensor with
parts of many parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .backends.base import CastInUse, StoredCodes, read_raw_weight
from .gemms import Gemm
from .scan import ScannedModule

#: names of the master weight in an optimizer's state, such as the state of Transformer Engine's FusedAdam
_STATES = ("master_param", "master_params", "master_weight")


#: optimizer class with which ranks have different parts of weights, but never copies
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


class MasterWeights:
    """Finds master weights of a model's parameters."""

    def __init__(self) -> None:
        #: Megatron's gradient buffers, as found in the sampled step
        self.buffers: Sequence[Any] = ()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that steps."""
        self._optimizers.add(optimizer)

    def find_master(self, parameter: Any) -> tuple[torch.Tensor, int] | None:
        """Return the flat float32 master weight and the index of its first value in the parameter, or None if not found.

        Raises:
            LookupError: ranks keep parts of the master weight, and this rank's part is unknown.
        """
        if getattr(parameter, "main_param_sharded", False):
            return self._part(parameter)
        main: Any = getattr(parameter, "main_param", None)
        return (main.detach().reshape(-1), 0) if _is_whole(main, parameter) else self._of_optimizers(parameter)

    def _of_optimizers(self, parameter: Any) -> tuple[torch.Tensor, int] | None:
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter, {})
            for name in _STATES:
                if _is_whole(state.get(name), parameter):
                    return state[name].detach().reshape(-1), 0
        return None

    def _part(self, parameter: Any) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a master weight, which may be empty, and the index of its first value."""
        main = parameter.main_param
        if main is None:
            return torch.empty(0, device=parameter.device), 0
        for buffer in self.buffers:
            if parameter in buffer.param_index_map:
                start = find_bucket_part_start(buffer, parameter)
                if main.dtype == torch.float32 and start + main.numel() <= parameter.numel():
                    return main.detach().reshape(-1), start
        raise LookupError("ranks keep parts of its master weight, and this rank's part is unknown")


def find_gradient_buffers(scanned: Iterable[ScannedModule]) -> list[tuple[nn.Module, Any]]:
    """Return Megatron's gradient buffers, each with its module. Ranks may keep different parts of a buffer."""
    names = "buffers", "expert_parallel_buffers"
    held = [(one.module, one.module.__dict__[name]) for one in scanned for name in names if name in one.module.__dict__]
    return [(module, buffer) for module, found in held if isinstance(found, list) for buffer in found]


def choose_measured_weight(stored: StoredCodes, masters: MasterWeights | None) -> tuple[torch.Tensor, CastInUse, CastInUse]:
    """Return the tensor to measure for a weight stored as codes: its master weight if found, otherwise the codes' values.

    Returns:
        The tensor, or only this rank's part of it; the cast of this tensor or part; and the cast of all codes.
    """
    codes, use, parameter = stored.decode_values(), stored.find_cast(), stored.parameter
    as_stored = replace(use, source="stored", decoded=codes)
    if use.source == "not quantized":
        return codes.values, use, use
    found = masters.find_master(parameter) if masters else None
    if found is None:
        return codes.values, as_stored, as_stored
    x, start = found
    if x.numel() == codes.values.numel():
        use = replace(use, decoded=codes)
        return x.reshape(codes.values.shape), use, use
    return x, replace(use, decoded=codes.slice_values(start, x.numel())), as_stored


def _is_whole(master: Any, parameter: Any) -> bool:
    return isinstance(master, torch.Tensor) and master.dtype == torch.float32 and master.numel() == parameter.numel()


def find_bucket_part_start(buffer: Any, parameter: Any) -> int:
    """Return the index in a parameter where this rank's part of a bucket begins. Ranks have equal parts of each bucket."""
    start, _, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    mine = bucket.offset + group.rank() * (bucket.grad_data.numel() // group.size())
    return max(0, int(mine - start))


@dataclass(frozen=True)
class OptimizerWeight:
    """A weight and the tensor that an optimizer updates for it."""

    name: str
    weight: Any
    #: parameter of the optimizer
    parameter: Any
    #: where the weight's values begin in a flat `parameter`, and their number; None if `parameter` has no other values
    place: tuple[int, int] | None = None

    def select_weight_values(self, x: Any) -> Any:
        """Return the weight's values in a tensor with the layout of `parameter`."""
        if self.place is None or not isinstance(x, torch.Tensor):
            return x
        begin, count = self.place
        return x.detach().reshape(-1)[begin : begin + count] if x.numel() >= begin + count else None


def find_gemm_parameter(gemm: Gemm) -> Any:
    """Return the parameter that a GEMM multiplies, as its module stores it, or None if the parameter's name is unknown."""
    if gemm.part and not gemm.part.isdigit():
        return None
    return read_raw_weight(gemm.module, f"weight{gemm.part}")


def list_optimizer_weights(optimizer: Any, gemms: Mapping[str, Gemm]) -> Iterator[OptimizerWeight]:
    """Yield the weights that an optimizer updates.

    Args:
        gemms: GEMMs by name.
    """
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, gemm in gemms.items():
        weight = find_gemm_parameter(gemm)
        own = next((p for p in (weight, getattr(weight, "main_param", None)) if p is not None and id(p) in held), None)
        if own is not None and not _is_flattened(own, weight):
            yield OptimizerWeight(name, weight, own)
        elif (place := _in_a_flat_one(weight, held)) is not None:
            yield OptimizerWeight(name, weight, *place)


def _is_flattened(own: Any, weight: Any) -> bool:
    """Return True if the parameter is a flat part of a weight (FSDP1). It does not show whether other ranks have copies."""
    return own is weight and own.dim() < 2


def is_optimizer_state_sharded(weight: Any) -> bool:
    """Return True if ranks have different parts of the optimizer's state for a weight."""
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def _in_a_flat_one(weight: Any, held: Mapping[int, Any]) -> tuple[Any, tuple[int, int]] | None:
    """Return the flat tensor that ZeRO updates, and the place of this rank's part of a weight in this tensor.

    Return None if the tensor has no part of the weight, or if ranks may hold copies of the part (MiCS).
    """
    stage_3 = getattr(weight, "_z3_optimizer", None)
    if stage_3 is not None:
        if type(stage_3).__name__ != _STAGE_3:
            return None
        group, begin, padded = stage_3.grad_position[stage_3.get_param_id(weight)]
        flat = stage_3.fp32_partitioned_groups_flat[group]
        behind = dist.get_rank(weight.ds_process_group) * padded  # the last parts are padded with zeros
        count = min(max(weight.ds_numel - behind, 0), padded)
        return (flat, (begin, count)) if id(flat) in held and count and begin + count <= flat.numel() else None
    mapping = getattr(weight, "_hp_mapping", None)
    if mapping is None:
        return None
    lies_in = mapping.hp_fragment.untyped_storage().data_ptr()
    flat = next((p for p in held.values() if p.untyped_storage().data_ptr() == lies_in), None)
    address = mapping.hp_fragment_address
    return None if flat is None else (flat, (address.start, address.numel))

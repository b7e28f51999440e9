"""What an optimizer has of the weights of GEMMs: master weights of those that are stored in codes, and what it steps by.

Megatron's optimizers leave a master weight in the parameter's attribute `main_param`; its distributed one leaves each rank a
part. That of other optimizers is in their state: they are seen when they step. What they step by is the parameter itself,
its float32 copy or part of one, or a place in a flat tensor that has parts of many (DeepSpeed's ZeRO).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .backends.base import ScaleInUse, StoredCodes, read_raw_weight
from .gemms import Gemm
from .scan import ScannedModule

#: under which optimizers keep it in their state, such as Transformer Engine's FusedAdam
_STATES = ("master_param", "master_params", "master_weight")


#: the class whose parts of weights are no copies of each other
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


class Masters:
    """Finds master weights of a model's parameters."""

    def __init__(self) -> None:
        #: Megatron's buffers of gradients, as the sampled step finds them
        self.buffers: Sequence[Any] = ()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, optimizer: Any) -> None:
        """Notice an optimizer that steps."""
        self._optimizers.add(optimizer)

    def of(self, parameter: Any) -> tuple[torch.Tensor, int] | None:
        """The master weight, flat and in float32, and at which value of the parameter it begins; None: none is found.

        Raises:
            LookupError: ranks keep parts of it, and which one this rank has is not known.
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
        """What this rank has of it, which may be nothing."""
        main = parameter.main_param
        if main is None:
            return torch.empty(0, device=parameter.device), 0
        for buffer in self.buffers:
            if parameter in buffer.param_index_map:
                start = find_part_start(buffer, parameter)
                if main.dtype == torch.float32 and start + main.numel() <= parameter.numel():
                    return main.detach().reshape(-1), start
        raise LookupError("ranks keep parts of its master weight, and which one this rank has is not known")


def find_buffers(scanned: Iterable[ScannedModule]) -> list[tuple[nn.Module, Any]]:
    """Return Megatron's buffers of gradients, of which ranks may keep parts, each with the module that has it."""
    names = "buffers", "expert_parallel_buffers"
    held = [(one.module, vars(one.module).get(name)) for one in scanned for name in names]
    return [(module, buffer) for module, found in held if isinstance(found, list) for buffer in found]


def beside_master(stored: StoredCodes, masters: Masters | None) -> tuple[torch.Tensor, ScaleInUse, ScaleInUse]:
    """W in codes: what is measured, its master weight or, if none is found, what the codes stand for; and how that was cast.

    Returns:
        What is measured, which may be a rank's part; its cast; and the cast of all that the codes stand for.
    """
    codes, use, parameter = stored.decoded(), stored.cast(), stored.parameter
    as_stored = replace(use, source="stored", decoded=codes)
    if use.source == "not quantized":
        return codes.values, use, use
    found = masters.of(parameter) if masters else None
    if found is None:
        return codes.values, as_stored, as_stored
    x, start = found
    if x.numel() == codes.values.numel():
        use = replace(use, decoded=codes)
        return x.reshape(codes.values.shape), use, use
    return x, replace(use, decoded=codes.part(start, x.numel())), as_stored


def _is_whole(master: Any, parameter: Any) -> bool:
    return isinstance(master, torch.Tensor) and master.dtype == torch.float32 and master.numel() == parameter.numel()


def find_part_start(buffer: Any, parameter: Any) -> int:
    """Ranks have equal parts of each bucket: of a parameter, where this rank's part of its bucket begins."""
    start, _, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    mine = bucket.offset + group.rank() * (bucket.grad_data.numel() // group.size())
    return max(0, int(mine - start))


@dataclass(frozen=True)
class Stepped:
    """A weight, as an optimizer steps by it."""

    name: str
    weight: Any
    #: of the optimizer
    parameter: Any
    #: where the weight's values begin in a flat `parameter`, and how many they are; None: it has no others
    place: tuple[int, int] | None = None

    def of(self, x: Any) -> Any:
        """The weight's values in a tensor that lies as `parameter` does."""
        if self.place is None or not isinstance(x, torch.Tensor):
            return x
        begin, count = self.place
        return x.detach().reshape(-1)[begin : begin + count] if x.numel() >= begin + count else None


def find_weight(gemm: Gemm) -> Any:
    """The parameter that a GEMM multiplies, as its module holds it; None: its name is not known."""
    if gemm.part and not gemm.part.isdigit():
        return None
    return read_raw_weight(gemm.module, f"weight{gemm.part}")


def stepped_by(optimizer: Any, gemms: Mapping[str, Gemm]) -> Iterator[Stepped]:
    """The weights that an optimizer steps by.

    Args:
        gemms: by name.
    """
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, gemm in gemms.items():
        weight = find_weight(gemm)
        own = next((p for p in (weight, getattr(weight, "main_param", None)) if p is not None and id(p) in held), None)
        if own is not None and not _is_flattened(own, weight):
            yield Stepped(name, weight, own)
        elif (place := _in_a_flat_one(weight, held)) is not None:
            yield Stepped(name, weight, *place)


def _is_flattened(own: Any, weight: Any) -> bool:
    """Whether the weight itself is a flat part of one (FSDP1), of which other ranks may have parts or copies: that cannot
    be told from it."""
    return own is weight and own.dim() < 2


def is_split_by_zero(weight: Any) -> bool:
    """Whether ranks have parts of a weight's states that are no copies of each other."""
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def _in_a_flat_one(weight: Any, held: Mapping[int, Any]) -> tuple[Any, tuple[int, int]] | None:
    """The flat tensor that ZeRO steps by, and the place in it of this rank's part of a weight; None: it has none there, or
    ranks may hold copies of it (MiCS)."""
    stage_3 = getattr(weight, "_z3_optimizer", None)
    if stage_3 is not None:
        if type(stage_3).__name__ != _STAGE_3:
            return None
        group, begin, padded = stage_3.grad_position[stage_3.get_param_id(weight)]
        flat = stage_3.fp32_partitioned_groups_flat[group]
        behind = dist.get_rank(weight.ds_process_group) * padded  # the last parts are filled up with zeros
        count = min(max(weight.ds_numel - behind, 0), padded)
        return (flat, (begin, count)) if id(flat) in held and count and begin + count <= flat.numel() else None
    mapping = getattr(weight, "_hp_mapping", None)
    if mapping is None:
        return None
    lies_in = mapping.hp_fragment.untyped_storage().data_ptr()
    flat = next((p for p in held.values() if p.untyped_storage().data_ptr() == lies_in), None)
    address = mapping.hp_fragment_address
    return None if flat is None else (flat, (address.start, address.numel))

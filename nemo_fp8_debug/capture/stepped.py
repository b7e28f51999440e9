"""What an optimizer steps by, of the weights of GEMMs: the parameter itself, its float32 copy or part of one, or a place in
a flat tensor that has parts of many (DeepSpeed's ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .backends.base import raw_weight
from .gemms import Gemm

#: the class whose parts of weights are no copies of each other
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


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


def weight_of(gemm: Gemm) -> Any:
    """The parameter that a GEMM multiplies, as its module holds it; None: its name is not known."""
    if gemm.part and not gemm.part.isdigit():
        return None
    return raw_weight(gemm.module, f"weight{gemm.part}")


def stepped_by(optimizer: Any, gemms: Mapping[str, Gemm]) -> Iterator[Stepped]:
    """The weights that an optimizer steps by.

    Args:
        gemms: by name.
    """
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, gemm in gemms.items():
        weight = weight_of(gemm)
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

"""Shapes of parameters as they are multiplied, wherever an engine keeps the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


def shape_of(parameter: Any) -> tuple[int, ...] | None:
    """None: not known before the first call. DeepSpeed keeps parameters empty and their shapes beside them."""
    if parameter is None or is_lazy(parameter):
        return None
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def linear_shape(module: nn.Module, part: str = "") -> tuple[int, ...] | None:
    """Outputs and inputs of a linear module, or of one part of it; None: not known."""
    own = module._parameters
    found = shape_of(own.get(_weight_name(part))) if part or not isinstance(module, nn.Linear) else None
    if found is not None and len(found) == 2 and min(found) > 0:
        return found
    if part:
        return None
    sizes = [
        (getattr(module, f"output_size{local}", None), getattr(module, f"input_size{local}", None))
        for local in ("_per_partition", "")
    ]
    sizes.append((getattr(module, "out_features", None), getattr(module, "in_features", None)))
    if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):  # one of the two sizes is split
        sizes = [(sizes[0][0] or sizes[1][0], sizes[0][1] or sizes[1][1])]
    return next(((o, i) for o, i in sizes if isinstance(o, int) and isinstance(i, int) and o and i), None)


def parts_of_ranks(module: nn.Module, around: Sequence[nn.Module]) -> int | None:
    """Into how many parts ranks split what a module multiplies; None: not known.

    A DTensor is split by tensor parallelism, and once more by FSDP2, which gathers it before it is multiplied.

    Args:
        around: the modules that it is in.
    """
    weight: Any = module._parameters.get("weight")
    if not hasattr(weight, "placements") or not isinstance(module, nn.Linear):
        return 1  # of other layers the parameter is the rank's own
    gathered = _dimensions_gathered((module, *around))
    if gathered is None:
        return None
    of_mesh = zip(weight.placements, weight.device_mesh.shape, strict=True)
    ranks: int = math.prod(size for placement, size in list(of_mesh)[gathered:] if placement.is_shard())
    return ranks


def _dimensions_gathered(modules: Sequence[nn.Module]) -> int | None:
    """How many dimensions of a mesh the innermost FSDP2 around a parameter gathers over, which are the first."""
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            state = getattr(module, "_get_fsdp_state")()  # noqa: B009 - torch types what nn.Module has as tensors
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            if groups[0] is not None:
                mesh = getattr(getattr(groups[0], "mesh_info", None), "mesh", None)
                return None if mesh is None else int(mesh.ndim)
    return 0


def _weight_name(part: str) -> str:
    return f"weight{part}" if part.isdigit() else f"{part}_weight" if part else "weight"


def needs_gradient(module: nn.Module) -> bool:
    """Whether a matrix of the module itself does; a module that is given its weight is taken for one that does."""
    matrices = [p for name, p in module._parameters.items() if p is not None and not name.endswith("bias")]
    return not matrices or any(p.requires_grad for p in matrices)

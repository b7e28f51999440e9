"""Linear, and LayerNormLinear, which normalizes the operand inside."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ...tensors import as_multiplied
from ..base import Args, Kwargs, ScaleInUse, raw_weight
from .casts import Held, active_recipe, cached_weight_cast, cast_of, is_quantized
from .layernorm_output import normalized
from .stored import is_read, stored_weight

_HELD = {
    "input": Held("input_quantizer", None, 0),
    "weight": Held("weight_quantizer", None, 1),
    "grad_output": Held("grad_output_quantizer", None, 0),
}


def first_argument(args: Args, kwargs: Kwargs) -> Any:
    """What a module's forward was called with."""
    return args[0] if args else next(kwargs[name] for name in ("inp", "x") if name in kwargs)


def operand_x(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """X; None where it comes in FP8."""
    x = first_argument(args, kwargs)
    if is_quantized(x):
        return None
    x = as_multiplied(x)
    return normalized(module, x) if hasattr(module, "layer_norm_weight") else x


def operand_w(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """W as it is cast; in high precision as it is multiplied."""
    weight = raw_weight(module)
    if weight is None or is_quantized(weight):
        return None
    return weight if active_recipe(module) is not None else as_multiplied(weight)


def unseen(module: Any, part: str) -> Collection[str]:
    """Weights that are stored in a way that is not read."""
    return ("weight",) if is_quantized(raw_weight(module)) and not is_read(stored_weight(module)) else ()


def cast(module: Any, kwargs: Kwargs, part: str, role: str, out: torch.Tensor) -> Callable[[], ScaleInUse]:
    """What tells how `role` is cast by the call that has returned `out`."""
    read = cast_of(module, role, _HELD[role], out, kwargs)
    return (lambda: cached_weight_cast(module, kwargs, "weight", read)) if role == "weight" else read

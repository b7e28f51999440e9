"""Operands and casts of LayerNormMLP, which has two GEMMs. Hooks cannot observe the activation between these GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ...tensors import cast_like_autocast
from ..base import Args, CastInUse, Kwargs, read_raw_weight
from .casts import QuantizerSlot, defer_cast_lookup, find_cached_weight_cast, is_quantized_tensor
from .linear import compute_norm, get_first_argument, read_uncast_weight
from .stored import is_supported_storage, read_stored_weight

_FORWARD = {("fc1", "input"): 0, ("fc1", "weight"): 1, ("fc2", "input"): 3, ("fc2", "weight"): 4}


def find_operand_x(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return X of fc1. X of fc2 is not visible."""
    x = get_first_argument(args, kwargs)
    if part == "fc2" or is_quantized_tensor(x):
        return None
    return compute_norm(module, cast_like_autocast(x))


def find_operand_w(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return W of fc1 or fc2, as `read_uncast_weight` does."""
    return read_uncast_weight(module, f"{part}_weight")


def list_unobserved_roles(module: Any, part: str) -> Collection[str]:
    """Return the roles that exist only inside the module, where hooks do not see them: X of fc2 and dY of fc1."""
    hidden, weight = ["input"] if part == "fc2" else ["grad_output"], read_raw_weight(module, f"{part}_weight")
    unread = is_quantized_tensor(weight) and not is_supported_storage(read_stored_weight(module, f"{part}_weight"))
    return [*hidden, "weight"] if unread else hidden


def defer_operand_cast(module: Any, kwargs: Kwargs, part: str, role: str, out: torch.Tensor) -> Callable[[], CastInUse]:
    """Return a function that determines the cast of `role` in the call with the output `out`."""
    slot = _fc2_grad_slot(module) if role == "grad_output" else _FORWARD[part, role]
    read = defer_cast_lookup(module, role, QuantizerSlot(f"{part}_{role}_quantizer", None, slot), out, kwargs)
    return (lambda: find_cached_weight_cast(module, kwargs, f"{part}_weight", read)) if role == "weight" else read


def _fc2_grad_slot(module: Any) -> int:
    """Return the slot of the quantizer for dY of fc2: 0 up to release 2.3, and 2 from release 2.4 on."""
    return 2 if hasattr(module, "_get_debug_quantizers") else 0

"""Operands and casts of GroupedLinear, which runs one GEMM per expert on rows of one input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...tensors import cast_like_autocast
from ..base import Args, CastInUse, Kwargs, UnknownCastError, read_raw_weight
from .casts import QuantizerSlot, defer_cast_lookup, find_backward_state, find_cached_weight_cast, is_quantized_tensor
from .linear import get_first_argument, read_uncast_weight
from .stored import is_supported_storage, read_stored_weight


def list_expert_parts(module: Any) -> Sequence[str]:
    """Return the numbers of the experts as strings."""
    return [str(i) for i in range(module.num_gemms)]


def find_operand_x(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return the rows of X for an expert, or None if the expert has no rows."""
    x = get_first_argument(args, kwargs)
    return None if is_quantized_tensor(x) else _rows(cast_like_autocast(x), args, kwargs, part)


def find_operand_w(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return W of an expert, as `read_uncast_weight` does."""
    return read_uncast_weight(module, f"weight{part}")


def find_operand_dy(grad: torch.Tensor, module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return the rows of dY for an expert, or None if the expert has no rows."""
    return _rows(grad, args, kwargs, part)


def _rows(x: torch.Tensor, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    splits = args[1] if len(args) > 1 else kwargs["m_splits"]
    if torch.is_tensor(splits):
        if splits.device.type != "cpu":
            raise RuntimeError("the numbers of tokens per expert are on the device, and reading them would block the run")
        splits = splits.tolist()
    rows = x.reshape(-1, x.shape[-1]).split(list(splits))[int(part)]
    return rows if len(rows) else None


def list_unobserved_roles(module: Any, part: str) -> Collection[str]:
    """Return the unobserved roles: "weight" if one parameter contains all experts or is stored as unsupported codes."""
    weight = read_raw_weight(module, f"weight{part}")
    unread = is_quantized_tensor(weight) and not is_supported_storage(read_stored_weight(module, f"weight{part}"))
    return ("weight",) if weight is None or unread else ()


def defer_operand_cast(module: Any, kwargs: Kwargs, part: str, role: str, out: torch.Tensor) -> Callable[[], CastInUse]:
    """Return a function that determines the cast of `role` in the call with the output `out`."""
    if role == "grad_output":
        _check_row_wise(find_backward_state(out))
    read = defer_cast_lookup(
        module, role, QuantizerSlot(f"{role}_quantizers", int(part), _slot(module, int(part), role)), out, kwargs
    )
    return (lambda: find_cached_weight_cast(module, kwargs, f"weight{part}", read)) if role == "weight" else read


def _check_row_wise(call: Any) -> None:
    """Check that a HybridQuantizer makes a row-wise copy. A quantizer makes only the copies that the call needs.

    Raises:
        UnknownCastError: the call makes no row-wise copy.
    """
    kinds = {type(quantizer).__name__ for quantizer in getattr(call, "grad_output_quantizers", None) or ()}
    if "HybridQuantizer" in kinds and not getattr(call, "requires_dgrad", True):
        raise UnknownCastError("it has no row-wise copy, because no gradient of X is needed")


def _slot(module: Any, expert: int, role: str) -> int:
    """Return the slot of an expert's quantizer. Up to release 2.2, slots are ordered by role, later by expert."""
    offset: int = module._offsets[role]
    strides = getattr(module, "_num_fp8_tensors_per_gemm", None)
    if strides is None:
        return offset + expert
    stride: int = strides["bwd" if role == "grad_output" else "fwd"]
    return offset + expert * stride

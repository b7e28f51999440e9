"""Operands and casts of Linear and LayerNormLinear. We compute X of LayerNormLinear again, as its fused kernel does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ...tensors import cast_like_autocast
from ..base import Args, CastInUse, Kwargs, read_raw_weight
from .casts import QuantizerSlot, defer_cast_lookup, find_active_recipe, find_cached_weight_cast, is_quantized_tensor
from .stored import is_supported_storage, read_stored_weight

_HELD = {
    "input": QuantizerSlot("input_quantizer", None, 0),
    "weight": QuantizerSlot("weight_quantizer", None, 1),
    "grad_output": QuantizerSlot("grad_output_quantizer", None, 0),
}


def get_first_argument(args: Args, kwargs: Kwargs) -> Any:
    """Return the first argument of a module's forward."""
    return args[0] if args else next(kwargs[name] for name in ("inp", "x") if name in kwargs)


def find_operand_x(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return X, or None if X arrives in FP8."""
    x = get_first_argument(args, kwargs)
    if is_quantized_tensor(x):
        return None
    x = cast_like_autocast(x)
    return compute_norm(module, x) if hasattr(module, "layer_norm_weight") else x


def find_operand_w(module: Any, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    """Return W, as `read_uncast_weight` does."""
    return read_uncast_weight(module)


def read_uncast_weight(module: Any, name: str = "weight") -> torch.Tensor | None:
    """Return W before its cast. If the module runs in high precision, return W in the dtype that the GEMM multiplies."""
    weight = read_raw_weight(module, name)
    if weight is None or is_quantized_tensor(weight):
        return None
    return weight if find_active_recipe(module) is not None else cast_like_autocast(weight)


def list_unobserved_roles(module: Any, part: str) -> Collection[str]:
    """Return the roles that hooks cannot observe: "weight" if it is stored as unsupported codes."""
    return (
        ("weight",)
        if is_quantized_tensor(read_raw_weight(module)) and not is_supported_storage(read_stored_weight(module))
        else ()
    )


def defer_operand_cast(module: Any, kwargs: Kwargs, part: str, role: str, out: torch.Tensor) -> Callable[[], CastInUse]:
    """Return a function that determines the cast of `role` in the call with the output `out`."""
    read = defer_cast_lookup(module, role, _HELD[role], out, kwargs)
    return (lambda: find_cached_weight_cast(module, kwargs, "weight", read)) if role == "weight" else read


def compute_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute LayerNorm or RMSNorm of `x` in float32, for a module that has just run.

    Under delayed scaling, the kernel casts the float32 result. Otherwise, it rounds the result to x's dtype before the cast.

    Args:
        x: [..., hidden], in the activations' dtype.
    """
    with torch.no_grad():
        gamma = _parameter(module, "layer_norm_weight", x.dtype)
        beta = _parameter(module, "layer_norm_bias", x.dtype)
        values: torch.Tensor = x.float()
        if module.normalization == "RMSNorm":
            result: torch.Tensor = values * (values.square().mean(-1, keepdim=True) + module.eps).rsqrt()
        else:
            centered = values - values.mean(-1, keepdim=True)
            result = centered * (centered.square().mean(-1, keepdim=True) + module.eps).rsqrt()
        if gamma is not None:
            result = result * (gamma + 1 if module.zero_centered_gamma else gamma)
        if beta is not None:
            result = result + beta
        return result.to(x.dtype) if not _is_cast_from_float32(module) else result


def _parameter(module: Any, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter.to(dtype).float()


def _is_cast_from_float32(module: Any) -> bool:
    returned = (getattr(module, name, False) for name in ("return_layernorm_output", "return_layernorm_output_gathered"))
    if not module.fp8 or any(returned):
        return False
    te_recipe = module.fp8_meta.get("recipe")
    if not hasattr(module, "quantizers"):
        return hasattr(te_recipe, "amax_history_len")
    quantizer = module.quantizers["scaling_fwd"][0]
    return type(quantizer).__name__ == "Float8Quantizer" and getattr(te_recipe, "backward_override", None) is None

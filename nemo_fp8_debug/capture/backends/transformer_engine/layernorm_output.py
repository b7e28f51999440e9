"""The GEMM's X where a module normalizes it inside: made again, as the fused kernel makes it."""

from __future__ import annotations

from typing import Any

import torch


def normalized(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm or RMSNorm of `x` in float32, by a module that has just run.

    Under delayed scaling the kernel casts the float32 result; otherwise it is rounded to x's dtype first, and cast then.

    Args:
        x: [..., hidden], in the dtype of the activations.
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

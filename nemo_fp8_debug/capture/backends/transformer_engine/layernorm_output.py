"""The GEMM's X where a module normalizes it inside: made again, as the fused kernel makes it."""

from __future__ import annotations

from typing import Any

import torch


def normalized(module: Any, x: torch.Tensor, te_recipe: Any) -> torch.Tensor:
    """LayerNorm or RMSNorm of `x` in float32.

    Under delayed scaling the kernel casts the float32 result; otherwise it is rounded to x's dtype first, and cast then.

    Args:
        x: [..., hidden], in the dtype of the activations.
        te_recipe: in force; None: high precision.
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
        result = result if _is_cast_from_float32(module, te_recipe) else result.to(x.dtype)
        return result


def _parameter(module: Any, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter.to(dtype).float()


def _is_cast_from_float32(module: Any, te_recipe: Any) -> bool:
    returned = (getattr(module, name, False) for name in ("return_layernorm_output", "return_layernorm_output_gathered"))
    return hasattr(te_recipe, "amax_history_len") and not any(returned)

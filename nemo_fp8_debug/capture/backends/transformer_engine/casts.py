"""What Transformer Engine casts an operand with: its recipe, and the scale that it holds at this very moment.

| what moved | since | how it is told here |
|---|---|---|
| `FP8GlobalStateManager` from `fp8.py` to `quantization.py` | 2.9 | the module that has it |
| the order of `LayerNormMLP`'s output gradients | 2.4 | `layernorm_mlp.py` |
| the order of `GroupedLinear`'s slots | 2.3 | `grouped.py` |

A delayed scale is read before the forward (X, W) or the backward (dY) that casts with it, and copied, since it moves in
place after each forward pass. A scale that follows the tensor is not read but found by the same rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ....numerics.block_scaling import BlockRule, BlockScaling, MXFP8Scaling, NVFP4Scaling
from ....numerics.recipe import Recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ...overrides import SWITCHED
from ..base import Kwargs, ScaleInUse

_HOLDERS = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
_STATES = {"input": "scaling_fwd", "weight": "scaling_fwd", "grad_output": "scaling_bwd"}
#: the recipe's options for a role under current scaling
_OPTIONS = {"input": "fp8_quant_fwd_inp", "weight": "fp8_quant_fwd_weight", "grad_output": "fp8_quant_bwd_grad"}
_SHADOW = Recipe(CurrentScaling())


def cast_of(module: Any, role: str, slot: int) -> ScaleInUse:
    """How `role` is cast by `module` in the call that begins.

    Args:
        slot: where the module's state for this direction keeps the operand.

    Raises:
        NotImplementedError: the recipe is not known here; says which.
    """
    return _cast(module, role, lambda: _held_scale(module, role, slot))


def cast_with(quantizer: Any, module: Any, role: str) -> ScaleInUse:
    """How Transformer Engine's `quantizer` has just cast `role` of `module`.

    Raises:
        NotImplementedError: the recipe is not known here; says which.
    """
    return _cast(module, role, lambda: quantizer.scale.detach().reshape(()).clone())


def _cast(module: Any, role: str, held_scale: Callable[[], torch.Tensor]) -> ScaleInUse:
    te_recipe = active_recipe(module, role)
    if te_recipe is None:
        return ScaleInUse(_SHADOW.scaling, _SHADOW.format_of(role), _SHADOW.name, "not quantized")  # type: ignore[arg-type]
    recipe = recipe_of(te_recipe, role)
    rule = recipe.scaling
    scale = rule if isinstance(rule, (CurrentScaling, BlockRule)) else held_scale()
    return ScaleInUse(scale, recipe.format_of(role), recipe.name, "engine")


def active_recipe(module: Any, role: str) -> Any:
    """Transformer Engine's recipe in force; None where the module runs in high precision."""
    if role == "grad_output":  # the backward pass is outside of the context; the forward pass left word in the module
        return module.fp8_meta.get("recipe") if getattr(module, "fp8", False) else None
    manager = state_manager()
    if manager is None or not manager.is_fp8_enabled():
        return None
    return SWITCHED[module] if module in SWITCHED else manager.get_fp8_recipe()


def state_manager() -> Any:
    """Transformer Engine's global state; None where it is not imported."""
    return next((getattr(sys.modules[m], "FP8GlobalStateManager", None) for m in _HOLDERS if m in sys.modules), None)


def recipe_of(te_recipe: Any, role: str) -> Recipe:
    """The recipe in our terms.

    Raises:
        NotImplementedError: it has none.
    """
    fp8_format = getattr(te_recipe, "fp8_format", None)
    fp8_format = fp8_format.name.lower() if fp8_format is not None else ""
    if hasattr(te_recipe, "amax_history_len"):
        algo = te_recipe.amax_compute_algo
        scaling = DelayedScaling(te_recipe.margin, te_recipe.amax_history_len, algo if isinstance(algo, str) else "max")
        return Recipe(scaling, fp8_format)
    options = getattr(te_recipe, _OPTIONS[role], None)
    if options is not None and _says(te_recipe, "float8_current_scaling"):
        return Recipe(CurrentScaling(options.amax_epsilon, options.power_2_scale), fp8_format)
    if options is not None and _says(te_recipe, "float8_block_scaling") and _blocks(te_recipe) == (1, 2, 1):
        return Recipe(BlockScaling(options.power_2_scale, options.amax_epsilon), fp8_format)
    if _says(te_recipe, "mxfp8"):
        return Recipe(MXFP8Scaling(), fp8_format)
    if _says(te_recipe, "nvfp4"):
        return Recipe(NVFP4Scaling())
    raise NotImplementedError(f"recipe {type(te_recipe).__name__} of Transformer Engine is not known here")


def _blocks(te_recipe: Any) -> tuple[int, ...]:
    """Dimensions of the blocks of X, W and dY."""
    return tuple(getattr(te_recipe, f"{name}_block_scaling_dim") for name in ("x", "w", "grad"))


def _says(te_recipe: Any, kind: str) -> bool:
    method = getattr(te_recipe, kind, None)
    return bool(method()) if callable(method) else False


def _held_scale(module: Any, role: str, slot: int) -> torch.Tensor:
    state = module.fp8_meta.get(_STATES[role])
    if state is None:  # made in the first forward pass, with scales of 1
        device = next((p.device for p in module.parameters()), None)
        return torch.ones((), dtype=torch.float32, device=device)
    scale: torch.Tensor = state.scale[slot].detach().clone()
    return scale


def cached_weight_cast(module: Any, kwargs: Kwargs, cache: str, use: ScaleInUse) -> ScaleInUse:
    """The cast of a weight that this call may not cast anew: all but the first micro-batch use the one that is cached."""
    # Megatron's wrappers keep it in the module, and pass None on where there is no cache.
    first = kwargs.get("is_first_microbatch", getattr(module, "is_first_microbatch", None))
    caches = not getattr(module, "disable_parameter_transpose_cache", False)
    cached = module._fp8_workspaces.get(cache) if first is False and caches else None
    scale_inv = getattr(cached, "_scale_inv", None)
    if use.source != "engine" or isinstance(use.scale, BlockRule) or scale_inv is None or scale_inv.numel() != 1:
        return use
    return ScaleInUse((1.0 / scale_inv).reshape(()).clone(), use.format, use.recipe, use.source)


def is_quantized(x: Any) -> bool:
    """Whether a tensor is one of Transformer Engine's, stored in FP8 already: there is nothing to compare it with."""
    return type(x).__module__.partition(".")[0] == "transformer_engine"

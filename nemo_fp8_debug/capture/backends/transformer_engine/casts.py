"""Find how a call of a Transformer Engine module casts an operand, from objects that belong to the call.

| what changed | since release | how we find it |
|---|---|---|
| `FP8GlobalStateManager` from `fp8.py` to `quantization.py` | 2.9 | the module that has it |
| the state of the backward from the autograd node to its own object (Linear) | 2.16 | the attribute `backward_objects` |
| quantizers, one for each operand | 2.0 | without them there is only delayed scaling, whose state we read |
| the order of `LayerNormMLP`'s output gradients | 2.4 | `layernorm_mlp.py` |
| the order of `GroupedLinear`'s slots | 2.3 | `grouped.py` |

The autograd node of a forward call contains the quantizers of the call, and shows what its backward will do. Each call
decides whether it quantizes dY. A call without gradient has no node, and uses the module's quantizers for X and W. We read
the quantizers of X and W after the forward, but before the end of an autocast updates delayed scales. We read the quantizer
of dY when dY arrives. If a scale depends on the tensor, we do not read this scale, but compute it by the same rule.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....numerics.block_scaling import BlockScalingRule
from ....numerics.nvfp4_scaling import SIGN_MASK, NVFP4Scaling
from ...patching import SWITCHED
from ..base import Args, CastInUse, Kwargs, UnknownCastError, make_unquantized_cast, read_raw_weight
from .environment import check_environment_variables
from .quantizers import make_delayed_cast, make_quantizer_cast

#: GEMM that uses the column-wise copy as its operand, by role
PRODUCT = {"input": "wgrad", "weight": "dgrad", "grad_output": "wgrad"}
#: GEMM that uses the row-wise copy as its operand, by role
_OTHERS = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}


def cast_with_copy(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    """Return how `quantizer` casts operand `role`. Include the column-wise copy if it is known and has other values.

    Raises:
        UnknownCastError: the quantizer of the row-wise copy is not supported.
    """
    use = make_quantizer_cast(quantizer, te_recipe, role)
    if quantizer is None:
        return use
    copy, same = _copy(quantizer, use, te_recipe, role)
    if not _is_sampled(use):
        use = replace(use, products={**use.products, _OTHERS[role]: None})
    if same and _is_sampled(use):
        return use
    return replace(use, columnwise=copy, products={**use.products, PRODUCT[role]: copy if _is_sampled(copy) else None})


def without_copy(use: CastInUse, role: str) -> CastInUse:
    """Return the cast for a call whose backward does not use the column-wise copy."""
    return replace(use, columnwise=None, products={**use.products, PRODUCT[role]: None})


def _is_sampled(use: CastInUse | None) -> bool:
    """Return True if rows of an operand with this cast suffice to compute the error of outputs."""
    rule = use and use.scale
    return use is not None and not (isinstance(rule, NVFP4Scaling) and (rule.stochastic or rule.hadamard))


def _copy(quantizer: Any, use: CastInUse, te_recipe: Any, role: str) -> tuple[CastInUse | None, bool]:
    """Return the cast of the column-wise copy, if quantized and known, and whether both copies have the same values."""
    if type(quantizer).__name__ == "HybridQuantizer":
        if quantizer.columnwise_source != "original":
            return None, False
        try:
            other = make_quantizer_cast(quantizer.columnwise_quantizer, te_recipe, role)
        except UnknownCastError:
            return None, False
        copy, same = _copy(quantizer.columnwise_quantizer, other, te_recipe, role)
        if same:
            return (None, True) if other == use else (other if _is_quantized(other) else None, False)
        return copy, False
    if not _is_quantized(use) or not isinstance(use.scale, BlockScalingRule):
        return None, True
    rule = use.scale
    if getattr(quantizer, "with_rht", False):
        signs = {0: "plain", SIGN_MASK: "signs"}.get(quantizer.rht_matrix_random_sign_mask_t)
        if signs is None or not quantizer.with_post_rht_amax or not isinstance(rule, NVFP4Scaling) or _is_square(rule, role):
            return None, False
        rule = replace(rule, hadamard=signs)
    elif _is_square(rule, role):
        return None, True
    if isinstance(rule, NVFP4Scaling) and rule.row_scaled:
        rule = replace(rule, row_scaled=False)  # the kernel computes one scale per row of X, but none per column
    return replace(use, scale=rule, recipe=replace(use.recipe, scaling=rule)), False


def _is_square(rule: BlockScalingRule, role: str) -> bool:
    high, wide = rule.get_block_shape(role)
    return high == wide and not (isinstance(rule, NVFP4Scaling) and rule.stochastic)


def _is_quantized(use: CastInUse) -> bool:
    return use.source in ("engine", "expected")


_HOLDERS = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
_STATES = {"input": "scaling_fwd", "weight": "scaling_fwd", "grad_output": "scaling_bwd"}
#: largest number of nodes to search for a module's own node. Views, an added bias and checkpoints add nodes after it
_FARTHEST = 8


@dataclass(frozen=True)
class QuantizerSlot:
    """The location of an operand's quantizer in a call."""

    #: attribute of the autograd node's state, such as `input_quantizer`, and the index if the attribute is a list
    name: str
    number: int | None
    #: index in the module's list of quantizers for forward or backward
    slot: int


def defer_cast_lookup(
    module: Any, role: str, held: QuantizerSlot, out: torch.Tensor, known: Kwargs
) -> Callable[[], CastInUse]:
    """Return a function that determines the cast of `role` in the call with output `out`. For dY, call it in the backward.

    Args:
        known: facts that `read_cache_and_autocast_state` returned before the call.

    Raises:
        UnknownCastError: the cast is unknown. The returned function may also raise this.
    """
    check_environment_variables(module, role)
    call = find_backward_state(out)
    if role != "grad_output":
        return lambda: _not_moved(_forward_cast(module, role, held, call), known)
    # Do not keep the node alive, because it would be freed late, with all tensors saved for the backward.
    if call is None or not hasattr(call, "fp8"):
        raise UnknownCastError("the autograd node of its call is not supported")
    if not getattr(call, "debug", False) and (not call.fp8 or getattr(call, "backward_override", None) is not None):
        return lambda: make_unquantized_cast(role)
    te_recipe, quantizer = module.fp8_meta.get("recipe"), _quantizer_of(module, role, held, call)
    return lambda: quantizer(te_recipe)


def _not_moved(use: CastInUse, known: Kwargs) -> CastInUse:
    """Return `use` if its scale, which was read after the call, is still the scale that the call has used.

    When the outermost autocast ends, it updates the scale.

    Raises:
        UnknownCastError: the outermost autocast has ended, or may have ended.
    """
    if use.source == "engine" and isinstance(use.scale, torch.Tensor) and not known.get("autocasts"):
        raise UnknownCastError(
            "no autocast was seen around its call, and an autocast inside would already have updated its scale"
        )
    return use


def autocast_depth() -> int | None:
    """Return how many of Transformer Engine's autocasts are open, or None if unknown."""
    manager = find_state_manager()
    state = getattr(manager, "quantization_state", manager)
    names = ("autocast_depth", "AUTOCAST_DEPTH", "FP8_AUTOCAST_DEPTH")
    return next((getattr(state, name) for name in names if hasattr(state, name)), None)


def _forward_cast(module: Any, role: str, held: QuantizerSlot, call: Any) -> CastInUse:
    debug = getattr(call, "debug", False) if call is not None else getattr(module, "debug_enabled_in_this_iteration", False)
    if not hasattr(module, "fp8"):
        raise UnknownCastError("its module does not show whether it runs in FP8")
    if not module.fp8 and not debug:
        return make_unquantized_cast(role)
    return _quantizer_of(module, role, held, call, debug)(module.fp8_meta.get("recipe"))


def _quantizer_of(module: Any, role: str, held: QuantizerSlot, call: Any, debug: bool = False) -> Callable[[Any], CastInUse]:
    """Return a function that receives the recipe and returns the cast, from the quantizer of the call or of the module."""
    found = getattr(call, held.name, None)
    if isinstance(found, (list, tuple)) and held.number is not None:
        found = found[held.number]
    if found is None:
        if debug:
            raise UnknownCastError("nvdlfw_inspect watches its module, and the call does not show its quantizer")
        if not hasattr(module, "quantizers"):
            scale = _state_before_quantizers(module, role).scale
            return lambda te_recipe: make_delayed_cast(scale[held.slot], te_recipe, role)
        found = module.quantizers[_STATES[role]][held.slot]
    if debug:
        return lambda te_recipe: without_copy(cast_with_copy(found, te_recipe, role), role)
    if not _multiplies_copy(module, role, held, call):
        return lambda te_recipe: _alone(cast_with_copy(found, te_recipe, role), role)
    return lambda te_recipe: cast_with_copy(found, te_recipe, role)


def _alone(use: CastInUse, role: str) -> CastInUse:
    return use if use.columnwise is None else without_copy(use, role)


def _multiplies_copy(module: Any, role: str, held: QuantizerSlot, call: Any) -> bool:
    """Return True if the backward of a call is known to use the column-wise copy of an operand."""
    if call is None or not getattr(call, "fp8", False) or getattr(call, "backward_override", None) is not None:
        return False
    if role == "weight":
        return bool(getattr(call, "requires_dgrad", False))
    names = ("requires_wgrad", "weights_requires_grad")
    return any(getattr(call, name, False) for name in names)


def _state_before_quantizers(module: Any, role: str) -> Any:
    state = module.fp8_meta.get(_STATES[role])
    if type(state).__name__ != "FP8TensorMeta":
        raise UnknownCastError(f"its module has no quantizers, and its state is a {type(state).__name__}")
    return state


def find_backward_state(out: torch.Tensor) -> Any:
    """Return the state that a call keeps for its backward, or None if no state is found."""
    node = find_call_node(out)
    return node if node is None else getattr(node, "backward_objects", node)


def find_call_node(out: torch.Tensor) -> Any:
    """Return the autograd node of the call with the output `out`, or None if no such node is found."""
    waiting, seen = deque([out.grad_fn] if out.grad_fn is not None else []), 0
    while waiting and seen < _FARTHEST:
        node, seen = waiting.popleft(), seen + 1
        if getattr(type(node), "_forward_cls", type(None)).__module__.startswith("transformer_engine.pytorch.module"):
            return node
        waiting += [earlier for earlier, _ in node.next_functions if earlier is not None]
    return None


def uses_split_accumulator(module: Any, product: str) -> bool:
    """Return True if partial sums of the tensor cores are added up in float32 for a product, under the recipe in force.

    If the recipe does not set this, Transformer Engine does so in dgrad and wgrad, but not in fprop.
    """
    te_recipe = module.fp8_meta.get("recipe")
    option = getattr(getattr(te_recipe, f"fp8_gemm_{product}", None), "use_split_accumulator", None)
    return product != "fprop" if option is None else bool(option)


def may_share_amax(module: Any) -> bool:
    """Return True if ranks may share the amax of a module's calls, as they do under sequence parallelism."""
    return bool(getattr(module, "sequence_parallel", False)) and getattr(module, "tp_size", 1) > 1


def find_active_recipe(module: Any) -> Any:
    """Return Transformer Engine's recipe in force in a forward pass, or None if the module runs in high precision."""
    manager = find_state_manager()
    if manager is None or not manager.is_fp8_enabled():
        return None
    return SWITCHED[module] if module in SWITCHED else manager.get_fp8_recipe()


def find_state_manager() -> Any:
    """Return Transformer Engine's global state, or None if it is not imported."""
    return next((getattr(sys.modules[m], "FP8GlobalStateManager", None) for m in _HOLDERS if m in sys.modules), None)


def read_cache_and_autocast_state(module: Any, args: Args, kwargs: Kwargs, place: int = 1) -> Kwargs:
    """Return facts about a call that is about to run: whether it uses a cached weight, and how many autocasts are open.

    `is_first_microbatch` is True if the call casts and caches its weight, False if it uses the cached weight, and None
    without a cache.

    Args:
        place: position of the argument `is_first_microbatch`.
    """
    if hasattr(module, "is_first_microbatch"):  # Megatron's wrappers
        caches = not getattr(module, "disable_parameter_transpose_cache", False)
        first = module.is_first_microbatch if caches else None
    else:
        first = args[place] if len(args) > place else kwargs.get("is_first_microbatch")
    return {"is_first_microbatch": first, "autocasts": autocast_depth()}


def find_cached_weight_cast(module: Any, kwargs: Kwargs, name: str, read: Callable[[], CastInUse]) -> CastInUse:
    """Return the cast of a weight, which may have been cached before the call.

    Raises:
        UnknownCastError: a call before this step cached the weight, and the weight may have changed since.
    """
    use = read()
    if use.source != "engine" or kwargs.get("is_first_microbatch") is not False:
        return use
    if getattr(read_raw_weight(module, name), "requires_grad", True):
        raise UnknownCastError("it was cast before this step and cached, and may have changed since")
    scale_inv = getattr(module._fp8_workspaces.get(name), "_scale_inv", None)
    if isinstance(use.scale, BlockScalingRule) or scale_inv is None or scale_inv.numel() != 1:
        return use
    return replace(use, scale=scale_inv.detach().reshape(()).reciprocal())


def is_quantized_tensor(x: Any) -> bool:
    """Return True for a tensor of Transformer Engine that is already stored in FP8 or FP4."""
    return type(x).__module__.partition(".")[0] == "transformer_engine"

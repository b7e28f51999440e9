"""Find how a quantizer of Transformer Engine casts a tensor, from the object itself.

If the quantizer's class or one of its attributes is unsupported, the cast is unknown, because an unsupported attribute may
change the cast whatever its value is. We read row-wise copies: X and W in the forward GEMM, and dY in the GEMM for dX. For
column-wise copies, see `casts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

import torch

from ....numerics.block_scaling import BlockScalingRule, Float8BlockScaling, MXFP8Scaling
from ....numerics.formats import FORMATS, FloatFormat
from ....numerics.nvfp4_scaling import NVFP4Scaling
from ....numerics.recipe import Recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ..base import CastInUse, UnknownCastError, make_unquantized_cast
from .environment import check_variable_option

#: module of each quantizer class in `transformer_engine.pytorch.tensor`, because other classes may have the same name
_MODULES: Mapping[str, str] = {
    "Float8Quantizer": "float8_tensor",
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "Float8BlockQuantizer": "float8_blockwise_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
    "IdentityQuantizer": "identity_tensor",
    "HybridQuantizer": "hybrid_tensor",
}
#: attributes of all quantizers: which copies to make, and in which layout
_LAYOUT = frozenset(("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"))
#: Transformer Engine's names of formats. If the extension has an enum, its values are ints
_FORMATS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
_AMAX_REDUCTION = ("with_amax_reduction", "amax_reduction_group")
_ROUNDING = ("force_pow_2_scales", "amax_epsilon")
#: supported attributes, by class. We read each attribute below, unless it does not change the row-wise copy
KNOWN: Mapping[str, frozenset[str]] = {
    "Float8Quantizer": frozenset(("scale", "amax", "dtype")),
    # Up to release 2.15, this class also has buffers for its kernel.
    "Float8CurrentScalingQuantizer": frozenset(
        ("dtype", *_ROUNDING, *_AMAX_REDUCTION, "scale", "amax", "use_existing_amax")
    ),
    "Float8BlockQuantizer": frozenset(("dtype", *_ROUNDING, "block_len", "block_scaling_dim", "all_gather_usage")),
    "MXFP8Quantizer": frozenset(("dtype", "with_2d_quantization")),
    # The random Hadamard transform affects only column-wise copies.
    "NVFP4Quantizer": frozenset(
        (
            *("dtype", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4", *_AMAX_REDUCTION),
            *("nvfp4_use_4over6", "nvfp4_e4m3_max", "nvfp4_4over6_err_mode"),
            *("with_rht", "with_post_rht_amax", "rht_matrix_random_sign_mask_t", "rht_matrix"),
        )
    ),
    "IdentityQuantizer": frozenset(("dtype",)),
    "HybridQuantizer": frozenset(("rowwise_quantizer", "columnwise_quantizer", "columnwise_source", *_AMAX_REDUCTION)),
}


def make_quantizer_cast(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    """Return how `quantizer` casts operand `role` at this moment.

    Args:
        quantizer: the quantizer that a call uses for this operand, or None if the call does not quantize the operand.
        te_recipe: Transformer Engine's recipe of the call. We name the cast after it.

    Raises:
        UnknownCastError: the quantizer's class or an attribute is not supported. The message names it.
    """
    if quantizer is None:
        return make_unquantized_cast(role)
    kind = type(quantizer)
    if kind.__name__ == "DebugQuantizer" and _is_ours(kind):
        return _inspected(quantizer, te_recipe, role)
    if kind.__module__ != f"transformer_engine.pytorch.tensor.{_MODULES.get(kind.__name__)}":
        raise UnknownCastError(f"its quantizer is a {kind.__module__}.{kind.__qualname__}, which is not supported")
    if strange := sorted((vars(quantizer).keys() | _class_attributes(kind)) - KNOWN[kind.__name__] - _LAYOUT):
        raise UnknownCastError(f"its {kind.__name__} has an unsupported attribute {strange[0]!r}")
    return _READERS[kind.__name__](quantizer, te_recipe, role)


def _class_attributes(kind: type) -> Set[str]:
    """Return the attributes that a class and its bases give each object: defaults, properties and slots, but not methods.

    Called at every cast. We search again only if something was set on one of the classes since the last search.
    """
    known = _attributes.get(kind)
    if known is None or any(vars(of) != then for of, then in known[0]):
        known = _attributes[kind] = [(of, dict(vars(of))) for of in kind.__mro__], _attributes_of(kind)
    return known[1]


def _attributes_of(kind: type) -> Set[str]:
    methods = (FunctionType, classmethod, staticmethod)
    return {
        name
        for of in kind.__mro__
        for name, value in vars(of).items()
        if not name.startswith("_") and not isinstance(value, methods)
    }


#: for each class: the contents of the class and its bases at the last search, and the attributes that we found
_attributes: dict[type, tuple[list[tuple[type, dict[str, Any]]], Set[str]]] = {}


def _is_ours(kind: type) -> bool:
    """Return True for Transformer Engine's own classes, and False for a user's subclass."""
    return kind.__module__.partition(".")[0] == "transformer_engine"


def _inspected(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    """Return the cast in a module that nvdlfw_inspect watches. A feature of nvdlfw_inspect may change the cast."""
    plan = getattr(quantizer, "rowwise_tensor_plan", None)
    if plan == "High Precision":
        return make_unquantized_cast(role)
    if plan != "Quantize":
        raise UnknownCastError(f"a feature of nvdlfw_inspect changes its cast (its plan is {plan!r})")
    return make_quantizer_cast(quantizer.parent_quantizer, te_recipe, role)


def make_delayed_cast(scale: torch.Tensor, te_recipe: Any, role: str) -> CastInUse:
    """Return the cast in a release without quantizers. The recipe determines its format.

    Args:
        scale: float32 scalar from the module's state.
    """
    if type(te_recipe).__name__ != "DelayedScaling" or not _is_ours(type(te_recipe)):
        raise UnknownCastError(f"recipe {type(te_recipe).__name__} is not supported for a module without quantizers")
    fmt = Recipe(DelayedScaling(), te_recipe.fp8_format.name.lower()).get_format(role)
    return _in_use(_history(te_recipe), scale.detach().reshape(()).clone(), fmt, te_recipe, role)


def _delayed(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    scale = quantizer.scale.detach().reshape(()).clone()
    return _in_use(_history(te_recipe), scale, _format(quantizer), te_recipe, role)


def _history(te_recipe: Any) -> DelayedScaling:
    """Return the rule of delayed scaling in the recipe. We only name the cast after it, because we read the scale itself."""
    algo = getattr(te_recipe, "amax_compute_algo", "max")
    return DelayedScaling(
        getattr(te_recipe, "margin", 0),
        getattr(te_recipe, "amax_history_len", 1024),
        algo if isinstance(algo, str) else "max",
    )


def _current(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    _refuse(quantizer, "use_existing_amax")
    by_power = _switch(quantizer, "force_pow_2_scales")
    check_variable_option("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", by_power)
    rule = CurrentScaling(_number(quantizer, "amax_epsilon"), by_power)
    use = _in_use(rule, rule, _format(quantizer), te_recipe, role)
    return replace(use, amax_group=_amax_group(quantizer))


def _blockwise(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    _check(quantizer, quantizer.block_len == 128, "block_len")
    dimensions = quantizer.block_scaling_dim
    _check(quantizer, dimensions in (1, 2), "block_scaling_dim")
    usual = 2 if role == "weight" else 1
    other = 0 if dimensions == usual else int(dimensions)
    rule = Float8BlockScaling(_switch(quantizer, "force_pow_2_scales"), _number(quantizer, "amax_epsilon"), other)
    return _in_use(rule, rule, _format(quantizer), te_recipe, role)


def _mxfp8(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    square = _switch(quantizer, "with_2d_quantization", default=False)
    # The option for square weights does not change the cast of X and dY, so the names of their recipes omit this option.
    rule = MXFP8Scaling(square_weights=square and role == "weight")
    _check(quantizer, not square or role == "weight", "with_2d_quantization")
    return _in_use(rule, rule, _format(quantizer), te_recipe, role)


def _nvfp4(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    _refuse_reduction(quantizer)
    square, by_chance = _switch(quantizer, "with_2d_quantization"), _switch(quantizer, "stochastic_rounding")
    row_scaled = _switch(quantizer, "row_scaled_nvfp4", default=False)
    _check(quantizer, not square or role == "weight", "with_2d_quantization")
    _check(quantizer, not row_scaled or not (square or by_chance), "row_scaled_nvfp4")
    rule = NVFP4Scaling(square or role != "weight", by_chance, row_scaled=row_scaled, **_four_over_six(quantizer, by_chance))
    use = _in_use(rule, rule, _format(quantizer), te_recipe, role)
    return replace(use, source="expected") if by_chance else use


def _four_over_six(quantizer: Any, by_chance: bool) -> dict[str, Any]:
    if not _switch(quantizer, "nvfp4_use_4over6", default=False):
        return {}
    _check(quantizer, not by_chance, "nvfp4_use_4over6")
    _check(quantizer, quantizer.nvfp4_4over6_err_mode in ("MAE", "MSE"), "nvfp4_4over6_err_mode")
    _check(quantizer, quantizer.nvfp4_e4m3_max in (448, 256), "nvfp4_e4m3_max")
    return {"four_over_six": quantizer.nvfp4_4over6_err_mode, "largest_scale": quantizer.nvfp4_e4m3_max}


def _identity(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    _check(quantizer, quantizer.dtype is None, "dtype")
    return make_unquantized_cast(role)


def _hybrid(quantizer: Any, te_recipe: Any, role: str) -> CastInUse:
    return make_quantizer_cast(quantizer.rowwise_quantizer, te_recipe, role)


_READERS: Mapping[str, Callable[[Any, Any, str], CastInUse]] = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "Float8BlockQuantizer": _blockwise,
    "MXFP8Quantizer": _mxfp8,
    "NVFP4Quantizer": _nvfp4,
    "IdentityQuantizer": _identity,
    "HybridQuantizer": _hybrid,
}


def _switch(quantizer: Any, option: str, default: Any = None) -> bool:
    """Return the value of a boolean option. Other types are not supported."""
    value = getattr(quantizer, option, default)
    _check(quantizer, isinstance(value, bool), option)
    return bool(value)


def _number(quantizer: Any, option: str) -> float:
    value = getattr(quantizer, option, None)
    _check(quantizer, isinstance(value, (int, float)) and not isinstance(value, bool), option)
    return float(cast(float, value))


def _refuse(quantizer: Any, option: str) -> None:
    """Raise UnknownCastError if this option is on, because it changes the cast in an unsupported way."""
    _check(quantizer, not getattr(quantizer, option, False), option)


def _refuse_reduction(quantizer: Any) -> None:
    """Raise UnknownCastError if ranks share the amax, because this rank's shard does not determine it."""
    _check(quantizer, _amax_group(quantizer) is None, "with_amax_reduction")


def _amax_group(quantizer: Any) -> Any:
    """Return the group of ranks that reduce the amax, or None if each rank uses its own amax."""
    if not getattr(quantizer, "with_amax_reduction", False):
        return None
    group = getattr(quantizer, "amax_reduction_group", None)
    if not torch.distributed.is_initialized():
        return group
    group = torch.distributed.group.WORLD if group is None else group
    return None if torch.distributed.get_world_size(group) == 1 else group


def _check(quantizer: Any, known: bool, attribute: str) -> None:
    if not known:
        value = getattr(quantizer, attribute, None)
        raise UnknownCastError(f"{attribute}={value!r} of its {type(quantizer).__name__} is not supported")


def _format(quantizer: Any) -> FloatFormat:
    name = getattr(quantizer.dtype, "name", str(quantizer.dtype).rpartition(".")[2])
    if name not in _FORMATS:
        raise UnknownCastError(f"dtype={quantizer.dtype!r} of its {type(quantizer).__name__} is not supported")
    return FORMATS[_FORMATS[name]]


def _in_use(
    rule: CurrentScaling | DelayedScaling | BlockScalingRule,
    scale: torch.Tensor | CurrentScaling | BlockScalingRule,
    fmt: FloatFormat,
    te_recipe: Any,
    role: str,
) -> CastInUse:
    """Return a cast. It is named after the format of the engine's recipe (such as hybrid), if this format casts the
    operand to `fmt`. Otherwise the cast is named after `fmt`.
    """
    asked = getattr(getattr(te_recipe, "fp8_format", None), "name", "").lower()
    return CastInUse(scale, fmt, _recipe_of(rule, asked, fmt, role), "engine")


@functools.lru_cache(maxsize=256)
def _recipe_of(rule: CurrentScaling | DelayedScaling | BlockScalingRule, asked: str, fmt: FloatFormat, role: str) -> Recipe:
    usable = asked in rule.formats and Recipe(rule, asked).get_format(role) == fmt
    if not usable and fmt.name not in rule.formats:
        raise UnknownCastError(f"its quantizer casts to {fmt.name}, which is not supported for {type(rule).__name__}")
    return Recipe(rule, asked if usable else fmt.name)

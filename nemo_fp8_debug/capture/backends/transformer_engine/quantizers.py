"""What a quantizer of Transformer Engine does to a tensor, told by the object itself.

Its class and every one of its attributes have to be known here. One that is not may change what a kernel does, whatever its
value, so that the cast is unknown then. Read are row-wise copies here: of X and W in the forward GEMM, of dY in the GEMM
that gives dX. Column-wise ones: `columnwise.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

import torch

from ....numerics.block_scaling import BlockRule, Float8BlockScaling, MXFP8Scaling
from ....numerics.formats import FORMATS, FloatFormat
from ....numerics.nvfp4_scaling import NVFP4Scaling
from ....numerics.recipe import Recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ..base import ScaleInUse, UnknownCast, make_unquantized_cast
from .environment import check_option

#: where each quantizer is defined, in `transformer_engine.pytorch.tensor`; another class may have its name elsewhere
_MODULES: Mapping[str, str] = {
    "Float8Quantizer": "float8_tensor",
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "Float8BlockQuantizer": "float8_blockwise_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
    "IdentityQuantizer": "identity_tensor",
    "HybridQuantizer": "hybrid_tensor",
}
#: of all quantizers: which copies are made, and in which layout
_LAYOUT = frozenset(("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"))
#: Transformer Engine's names of formats; an int where it is an enum of the extension
_FORMATS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
_AMAX_REDUCTION = ("with_amax_reduction", "amax_reduction_group")
_ROUNDING = ("force_pow_2_scales", "amax_epsilon")
#: by class: attributes that are read below, or change nothing in the row-wise copy
KNOWN: Mapping[str, frozenset[str]] = {
    "Float8Quantizer": frozenset(("scale", "amax", "dtype")),
    # Up to 2.15 with the buffers of its kernel.
    "Float8CurrentScalingQuantizer": frozenset(
        ("dtype", *_ROUNDING, *_AMAX_REDUCTION, "scale", "amax", "use_existing_amax")
    ),
    "Float8BlockQuantizer": frozenset(("dtype", *_ROUNDING, "block_len", "block_scaling_dim", "all_gather_usage")),
    "MXFP8Quantizer": frozenset(("dtype", "with_2d_quantization")),
    # The random Hadamard transform is of column-wise copies only.
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


def make_cast(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    """How `quantizer` casts operand `role` at this moment.

    Args:
        quantizer: that a call of a module holds; None: the call does not quantize this operand.
        te_recipe: Transformer Engine's recipe of the call, which gives the cast its name.

    Raises:
        UnknownCast: its class, or one of its attributes, is not known here; names it.
    """
    if quantizer is None:
        return make_unquantized_cast(role)
    kind = type(quantizer)
    if kind.__name__ == "DebugQuantizer" and _is_ours(kind):
        return _inspected(quantizer, te_recipe, role)
    if kind.__module__ != f"transformer_engine.pytorch.tensor.{_MODULES.get(kind.__name__)}":
        raise UnknownCast(f"its quantizer is a {kind.__module__}.{kind.__qualname__}, which is not known here")
    if strange := sorted((vars(quantizer).keys() | _class_attributes(kind)) - KNOWN[kind.__name__] - _LAYOUT):
        raise UnknownCast(f"its {kind.__name__} has an attribute {strange[0]!r}, which is not known here")
    return _READERS[kind.__name__](quantizer, te_recipe, role)


def _class_attributes(kind: type) -> Set[str]:
    """What a class and those above it give each object, beside methods: defaults, properties and slots.

    Asked at every cast, and looked for again only if something was set on one of the classes since.
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


#: by class: what it and those above it held then, and the names of attributes
_attributes: dict[type, tuple[list[tuple[type, dict[str, Any]]], Set[str]]] = {}


def _is_ours(kind: type) -> bool:
    """Whether a class is Transformer Engine's own, and no user's subclass."""
    return kind.__module__.partition(".")[0] == "transformer_engine"


def _inspected(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    """Of a module that nvdlfw_inspect looks into: a feature may change the cast."""
    plan = getattr(quantizer, "rowwise_tensor_plan", None)
    if plan == "High Precision":
        return make_unquantized_cast(role)
    if plan != "Quantize":
        raise UnknownCast(f"a feature of nvdlfw_inspect takes part in its cast (its plan is {plan!r})")
    return make_cast(quantizer.parent_quantizer, te_recipe, role)


def make_delayed_cast(scale: torch.Tensor, te_recipe: Any, role: str) -> ScaleInUse:
    """Of a release that has no quantizers: its format is the recipe's.

    Args:
        scale: float32 scalar that the state holds.
    """
    if type(te_recipe).__name__ != "DelayedScaling" or not _is_ours(type(te_recipe)):
        raise UnknownCast(f"recipe {type(te_recipe).__name__} is not known here of a module without quantizers")
    fmt = Recipe(DelayedScaling(), te_recipe.fp8_format.name.lower()).format_of(role)
    return _in_use(_history(te_recipe), scale.detach().reshape(()).clone(), fmt, te_recipe, role)


def _delayed(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    scale = quantizer.scale.detach().reshape(()).clone()
    return _in_use(_history(te_recipe), scale, _format(quantizer), te_recipe, role)


def _history(te_recipe: Any) -> DelayedScaling:
    """How scales follow amaxes, for the name: the scale itself is read."""
    algo = getattr(te_recipe, "amax_compute_algo", "max")
    return DelayedScaling(
        getattr(te_recipe, "margin", 0),
        getattr(te_recipe, "amax_history_len", 1024),
        algo if isinstance(algo, str) else "max",
    )


def _current(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    _refuse(quantizer, "use_existing_amax")
    by_power = _switch(quantizer, "force_pow_2_scales")
    check_option("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", by_power)
    rule = CurrentScaling(_number(quantizer, "amax_epsilon"), by_power)
    use = _in_use(rule, rule, _format(quantizer), te_recipe, role)
    return replace(use, amax_group=_amax_group(quantizer))


def _blockwise(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    _check(quantizer, quantizer.block_len == 128, "block_len")
    dimensions = quantizer.block_scaling_dim
    _check(quantizer, dimensions in (1, 2), "block_scaling_dim")
    usual = 2 if role == "weight" else 1
    other = 0 if dimensions == usual else int(dimensions)
    rule = Float8BlockScaling(_switch(quantizer, "force_pow_2_scales"), _number(quantizer, "amax_epsilon"), other)
    return _in_use(rule, rule, _format(quantizer), te_recipe, role)


def _mxfp8(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    square = _switch(quantizer, "with_2d_quantization", default=False)
    # X and dY under a recipe with square weights are cast as without it, and so named.
    rule = MXFP8Scaling(square_weights=square and role == "weight")
    _check(quantizer, not square or role == "weight", "with_2d_quantization")
    return _in_use(rule, rule, _format(quantizer), te_recipe, role)


def _nvfp4(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
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


def _identity(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    _check(quantizer, quantizer.dtype is None, "dtype")
    return make_unquantized_cast(role)


def _hybrid(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    return make_cast(quantizer.rowwise_quantizer, te_recipe, role)


_READERS: Mapping[str, Callable[[Any, Any, str], ScaleInUse]] = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "Float8BlockQuantizer": _blockwise,
    "MXFP8Quantizer": _mxfp8,
    "NVFP4Quantizer": _nvfp4,
    "IdentityQuantizer": _identity,
    "HybridQuantizer": _hybrid,
}


def _switch(quantizer: Any, option: str, default: Any = None) -> bool:
    """An option that is on or off, and nothing else."""
    value = getattr(quantizer, option, default)
    _check(quantizer, isinstance(value, bool), option)
    return bool(value)


def _number(quantizer: Any, option: str) -> float:
    value = getattr(quantizer, option, None)
    _check(quantizer, isinstance(value, (int, float)) and not isinstance(value, bool), option)
    return float(cast(float, value))


def _refuse(quantizer: Any, option: str) -> None:
    """An option that changes the cast in a way that is not measured here."""
    _check(quantizer, not getattr(quantizer, option, False), option)


def _refuse_reduction(quantizer: Any) -> None:
    """The amax is that of a group of ranks, and the shard of this rank does not tell it."""
    _check(quantizer, _amax_group(quantizer) is None, "with_amax_reduction")


def _amax_group(quantizer: Any) -> Any:
    """The ranks whose amaxes are reduced; None: this rank's own is the one."""
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
        raise UnknownCast(f"{attribute}={value!r} of its {type(quantizer).__name__} is not measured here")


def _format(quantizer: Any) -> FloatFormat:
    name = getattr(quantizer.dtype, "name", str(quantizer.dtype).rpartition(".")[2])
    if name not in _FORMATS:
        raise UnknownCast(f"dtype={quantizer.dtype!r} of its {type(quantizer).__name__} is not known here")
    return FORMATS[_FORMATS[name]]


def _in_use(
    rule: CurrentScaling | DelayedScaling | BlockRule,
    scale: torch.Tensor | CurrentScaling | BlockRule,
    fmt: FloatFormat,
    te_recipe: Any,
    role: str,
) -> ScaleInUse:
    """Named as the recipe is where that gives this format, and otherwise by the format."""
    asked = getattr(getattr(te_recipe, "fp8_format", None), "name", "").lower()
    return ScaleInUse(scale, fmt, _recipe_of(rule, asked, fmt, role), "engine")


@functools.lru_cache(maxsize=256)
def _recipe_of(rule: CurrentScaling | DelayedScaling | BlockRule, asked: str, fmt: FloatFormat, role: str) -> Recipe:
    usable = asked in rule.formats and Recipe(rule, asked).format_of(role) == fmt
    if not usable and fmt.name not in rule.formats:
        raise UnknownCast(f"its quantizer casts to {fmt.name}, which is not known here of {type(rule).__name__}")
    return Recipe(rule, asked if usable else fmt.name)

"""Find how a layer of torchao casts an operand, from the module's configuration.

| product | operands | fields of `Float8LinearConfig` |
|---|---|---|
| fprop | X, W | `cast_config_input`, `cast_config_weight` |
| dgrad | dY, W | `cast_config_grad_output`, `cast_config_weight_for_grad_input` |
| wgrad | dY, X | `cast_config_grad_output_for_grad_weight`, `cast_config_input_for_grad_weight` |

A row of the record has the cast of X and W in fprop, and of dY in dgrad. If a configuration has an unsupported field, the
cast is unknown, because this field may change the cast. Once per sampled step, we also compare torchao's
arithmetic with ours (`trial`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ....numerics.block_scaling import BlockScalingRule, MXFP8Scaling, RowwiseScaling
from ....numerics.formats import E2M1, FORMATS, FloatFormat
from ....numerics.nvfp4_scaling import TorchaoNVFP4Scaling
from ....numerics.recipe import Recipe
from ....numerics.tensor_scaling import TORCHAO_EPSILON, CurrentScaling
from ...tensors import is_dtensor
from ..base import CastInUse, UnknownCastError, make_unquantized_cast, read_raw_weight
from .layers import (
    FLOAT8_LINEAR,
    MXFP8_LINEAR,
    NVFP4_LINEAR,
    check_attributes,
    find_class_path,
    find_replaced_forward,
    name_layer_class,
)
from .trial import find_cast_difference
from .weights import find_weight_gathered_in_fp8, is_torchao_tensor

#: field of the configuration, by role and product; a row of the record has the first product's cast
CASTS: Mapping[str, Mapping[str, str]] = {
    "input": {"fprop": "cast_config_input", "wgrad": "cast_config_input_for_grad_weight"},
    "weight": {"fprop": "cast_config_weight", "dgrad": "cast_config_weight_for_grad_input"},
    "grad_output": {"dgrad": "cast_config_grad_output", "wgrad": "cast_config_grad_output_for_grad_weight"},
}
#: supported fields, by class of configuration. We read each field, unless the field does not change a cast
KNOWN: Mapping[str, frozenset[str]] = {
    "Float8LinearConfig": frozenset(
        (
            *(field for of_role in CASTS.values() for field in of_role.values()),
            *("round_scales_to_power_of_2", "enable_fsdp_float8_all_gather"),
            *("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight"),
            *("pad_inner_dim", "emulate", "force_recompute_fp8_weight_in_bwd"),
        )
    ),
    "CastConfig": frozenset(("scaling_type", "scaling_granularity", "target_dtype")),
    "Float8GemmConfig": frozenset(("use_fast_accum",)),
}
_FORMATS = {torch.float8_e4m3fn: FORMATS["e4m3"], torch.float8_e5m2: FORMATS["e5m2"]}
#: attributes that a `MXFP8Linear` has and a Linear does not have
MXFP8_OPTIONS = frozenset(("kernel_preference", "scale_calculation_mode", "wgrad_with_hp"))


def find_cast(module: nn.Module, role: str) -> CastInUse:
    """Return how `module` casts `role` in the call that has just returned.

    Raises:
        UnknownCastError: the class, a field of the configuration, or a value is not supported. The message names the cause.
    """
    kind, weight = name_layer_class(module), read_raw_weight(module)
    if kind not in _READERS:
        what = f"weight is a {find_class_path(weight)}" if is_torchao_tensor(weight) else f"module is a {kind}"
        raise UnknownCastError(f"its {what}, which is not supported")
    if why := find_replaced_forward(module):
        raise UnknownCastError(f"forward of its {kind} was replaced by {why}")
    if is_dtensor(weight):
        raise UnknownCastError("its weight is split by tensor parallelism, and torchao reduces its amax over ranks")
    return _READERS[kind](module, role)


def is_cast_in_forward(module: Any) -> bool:
    """Return True if X and W of a `Float8Linear` are cast, or if this is unknown."""
    kind = getattr(getattr(module.config, "cast_config_input", None), "scaling_type", None)
    return getattr(kind, "name", None) != "DISABLED"


def _float8_cast(module: Any, role: str) -> CastInUse:
    config = module.config
    _check_fields(config, "Float8LinearConfig", "config")
    for field in ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight"):
        _check_fields(getattr(config, field), "Float8GemmConfig", field)
    products = {product: _cast_by(config, field, role) for product, field in CASTS[role].items()}
    own, *_ = products.values()
    gathered = find_weight_gathered_in_fp8(module)
    if role == "weight" and gathered is not None:
        return _gathered_cast(gathered, config)
    if own is None:
        return replace(make_unquantized_cast(role), products=products)
    return replace(own, products={product: cast for product, cast in products.items() if cast != own})


def _cast_by(config: Any, field: str, role: str) -> CastInUse | None:
    """Return the cast that one field of a configuration sets, or None for high precision."""
    cast = getattr(config, field)
    _check_fields(cast, "CastConfig", field)
    kind = _choice(cast.scaling_type, "ScalingType", ("DYNAMIC", "DISABLED"), f"{field}.scaling_type")
    granularity = _choice(
        cast.scaling_granularity, "ScalingGranularity", ("TENSORWISE", "AXISWISE"), f"{field}.scaling_granularity"
    )
    if kind == "DISABLED":
        return None
    if cast.target_dtype not in _FORMATS:
        raise UnknownCastError(f"unsupported value in its Float8LinearConfig: {field}.target_dtype={cast.target_dtype}")
    rounds = config.round_scales_to_power_of_2
    if not isinstance(rounds, bool):
        raise UnknownCastError(f"unsupported value in its Float8LinearConfig: round_scales_to_power_of_2={rounds!r}")
    rule = RowwiseScaling(rounds) if granularity == "AXISWISE" else CurrentScaling(TORCHAO_EPSILON, rounds, rounds)
    return _tried(rule, _FORMATS[cast.target_dtype], config)


def _gathered_cast(weight: Any, config: Any) -> CastInUse:
    """Return the cast of a weight that was gathered as codes with one scale. This cast applies to both products."""
    fmt = _FORMATS.get(weight._data.dtype)
    if fmt is None or weight._scale.numel() != 1:
        raise UnknownCastError(f"it was gathered as {weight._data.dtype} with {weight._scale.numel()} scales")
    use = _named(CurrentScaling(TORCHAO_EPSILON), fmt, config)
    return replace(use, scale=weight._scale.detach().reshape(()).clone())


def _tried(rule: CurrentScaling | RowwiseScaling, fmt: FloatFormat, config: Any) -> CastInUse:
    if why := find_cast_difference(rule, fmt):
        raise UnknownCastError(f"unsupported torchao version: its casts differ from release 0.18 ({why})")
    return _named(rule, fmt, config)


def _named(rule: CurrentScaling | BlockScalingRule, fmt: FloatFormat, config: Any) -> CastInUse:
    """Return a cast. Its recipe is named "hybrid" if the whole configuration is hybrid."""
    targets = [getattr(config, next(iter(of_role.values()))).target_dtype for of_role in CASTS.values()]
    hybrid = targets == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]
    return CastInUse(rule, fmt, Recipe(rule, "hybrid" if hybrid else fmt.name), "engine")


def _mxfp8_cast(module: Any, role: str) -> CastInUse:
    check_attributes(module, MXFP8_OPTIONS)
    _choice(module.kernel_preference, "KernelPreference", ("EMULATED",), "kernel_preference")
    _choice(module.scale_calculation_mode, "ScaleCalculationMode", ("RCEIL",), "scale_calculation_mode")
    rule = MXFP8Scaling(by_logarithm=True)
    use = CastInUse(rule, FORMATS["e4m3"], Recipe(rule, "e4m3"), "engine")
    return replace(use, products={"wgrad": None}) if module.wgrad_with_hp and role != "weight" else use


# NVFP4Linear -----------------------------------------------------------------------------------------------------------
#
# How torchao's `NVFP4Linear` casts: its scales, and the codes that cannot be determined.
#
# | product | operands |
# |---|---|
# | fprop | X 1x16, W 16x16, rounded to nearest |
# | dgrad | dY 1x16, rounded stochastically; W 16x16, as in fprop |
# | wgrad | dY and X by column after a random Hadamard transform; dY rounded stochastically |
#
# The kernels run only on GPUs with compute capability 10.0 or later, so we cannot try them on other devices. Instead we list
# the releases whose kernels we have read.

#: releases of torchao whose NVFP4 kernels we have read
NVFP4_RELEASES = ("0.18",)
#: attributes and buffers that an `NVFP4Linear` has and a Linear does not have
NVFP4_OPTIONS = frozenset(
    ("kernel_preference", "process_group", "world_size", "tensor_parallel_style", "_rht_sign_vector_tuple")
)
NVFP4_BUFFERS = frozenset(("_sr_seed", "_rht_sign_vector"))


def find_nvfp4_cast(module: Any, role: str) -> CastInUse:
    """Return the cast of X in fprop, or of W.

    Raises:
        UnknownCastError: `role` is dY, or a part of the module is not supported.
    """
    version = str(getattr(sys.modules.get("torchao"), "__version__", ""))
    if ".".join(version.split(".")[:2]) not in NVFP4_RELEASES:
        raise UnknownCastError(f"the NVFP4Linear of torchao {version} is not supported")
    check_attributes(module, NVFP4_OPTIONS)
    if strange := sorted(module._buffers.keys() - NVFP4_BUFFERS):
        raise UnknownCastError(f"its NVFP4Linear has an unsupported buffer {strange[0]!r}")
    if getattr(module.kernel_preference, "name", None) != "TRITON":
        raise UnknownCastError(f"unsupported value in its NVFP4Linear: kernel_preference={module.kernel_preference}")
    if module.process_group is not None:
        raise UnknownCastError("its NVFP4Linear is split by tensor parallelism, and reduces its amax over ranks")
    if role == "grad_output":
        raise UnknownCastError("its NVFP4Linear rounds dY stochastically, so its codes cannot be determined")
    rule = TorchaoNVFP4Scaling()
    use = CastInUse(rule, E2M1, Recipe(rule), "engine")
    # The copy of X for wgrad is transformed before its cast, and we do not measure it.
    return CastInUse(use.scale, use.format, use.recipe, use.source, {"wgrad": None}) if role == "input" else use


_READERS: Mapping[str, Callable[[Any, str], CastInUse]] = {
    FLOAT8_LINEAR: _float8_cast,
    MXFP8_LINEAR: _mxfp8_cast,
    NVFP4_LINEAR: find_nvfp4_cast,
}


def _check_fields(config: Any, name: str, field: str) -> None:
    """Raise UnknownCastError unless every field of a configuration is supported, and its class is from torchao."""
    if find_class_path(config) != f"torchao.float8.config.{name}":
        raise UnknownCastError(f"its {field} is a {find_class_path(config)}, which is not supported")
    if strange := sorted((vars(config).keys() | type(config).__dataclass_fields__.keys()) - KNOWN[name]):
        raise UnknownCastError(f"its {name} has an unsupported field {strange[0]!r}")


def _choice(value: Any, enum: str, known: tuple[str, ...], field: str) -> str:
    """Return the name of an enum's value if it is supported."""
    name = getattr(value, "name", None)
    if type(value).__name__ != enum or name not in known:
        raise UnknownCastError(f"unsupported value {field}={value}")
    return str(name)


def name_release() -> str:
    """Return the installed release, such as `torchao 0.18.0`."""
    return f"torchao {getattr(sys.modules.get('torchao'), '__version__', '')}".strip()

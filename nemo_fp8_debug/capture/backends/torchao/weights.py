"""Find the weights of torchao's layers before the cast, even if FSDP2 gathers them in FP8."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ...tensors import is_dtensor
from ..base import read_raw_weight
from .layers import find_class_path

_GATHERED = "torchao.float8.float8_training_tensor.Float8TrainingTensor"
_TO_GATHER = "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"


def is_torchao_tensor(x: Any) -> bool:
    """Return True if a tensor, or this rank's part of it, is of a torchao class, which stores its values elsewhere."""
    return type(getattr(x, "_local_tensor", x)).__module__.partition(".")[0] == "torchao"


def require_uncast_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is not cast yet.

    Raises:
        TypeError: the tensor is already cast, as under torchao's tensor parallelism.
    """
    if is_torchao_tensor(x):
        kind = find_class_path(getattr(x, "_local_tensor", x))
        raise TypeError(f"it arrives as a {kind} without the values before the cast, so its error cannot be measured")
    return x


def find_weight_gathered_in_fp8(module: nn.Module) -> Any:
    """Return the weight that FSDP2 has gathered as codes and a scale, or None if FSDP2 gathered no codes."""
    weight = read_raw_weight(module)
    return weight if find_class_path(weight) == _GATHERED else None


def find_high_precision_weight(module: nn.Module) -> torch.Tensor | None:
    """Return W before its cast. If FSDP2 gathers codes, return this rank's part of W, as a DTensor.

    Raises:
        TypeError: the values are not available.
    """
    weight = read_raw_weight(module)
    if find_weight_gathered_in_fp8(module) is not None:
        weight = _kept_by_fsdp(module)
    return _plain(weight) if is_torchao_tensor(weight) else weight


def _plain(weight: Any) -> torch.Tensor:
    """Return a weight that will be cast when gathered, without the tensor class that does the cast."""
    part = getattr(weight, "_local_tensor", weight)
    if find_class_path(part) != _TO_GATHER:
        raise TypeError(f"it is stored as a {find_class_path(part)}, which is not supported")
    values: torch.Tensor = part._tensor.detach()
    if not is_dtensor(weight):
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )  # without a collective


def _kept_by_fsdp(module: nn.Module) -> Any:
    """Return the parameter from which FSDP2 has gathered the weight of `module`.

    Only FSDP2's own state holds this parameter.
    """
    states: Any = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for held in list(states.values()):
        state = held() if callable(held) else held
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            for param in getattr(group, "fsdp_params", ()):
                if param._module_info.module is module and param._module_info.param_name == "weight":
                    return param.sharded_param
    raise TypeError("it was gathered in FP8, and this rank's part in high precision was not found")

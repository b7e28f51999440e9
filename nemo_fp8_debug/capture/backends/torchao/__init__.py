"""Backend for linear layers of torchao. A layer's casts are unknown unless `casts.py` supports its class. Internal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...tensors import cast_like_autocast, is_dtensor
from ..base import Args, CastInUse, FrameworkBackend, Kwargs, read_raw_weight
from . import casts
from .layers import FLOAT8_LINEAR, MXFP8_LINEAR, NVFP4_LINEAR, find_class_path, name_layer_class
from .trial import reset_cast_trials
from .weights import find_high_precision_weight, is_torchao_tensor, require_uncast_tensor


def _owns(module: nn.Module) -> bool:
    """Return True for torchao's subclasses of Linear, and for a Linear whose weight is a torchao tensor."""
    if "torchao" not in sys.modules or not isinstance(module, nn.Linear):
        return False
    return any(base.__module__.partition(".")[0] == "torchao" for base in type(module).__mro__) or is_torchao_tensor(
        read_raw_weight(module)
    )


def _input(module: nn.Module, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor:
    x: torch.Tensor = require_uncast_tensor(args[0] if args else kwargs["input"])
    kind = name_layer_class(module)
    if kind == NVFP4_LINEAR:  # torchao ignores autocast here
        return x.to(torch.bfloat16)
    if kind != FLOAT8_LINEAR:
        return cast_like_autocast(x)
    if torch.is_autocast_enabled():  # `Float8Linear` checks the autocast of GPUs on any device
        x = x.to(torch.get_autocast_dtype("cuda"))
    return x if casts.is_cast_in_forward(module) else cast_like_autocast(x)


def _weight(module: nn.Module, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    weight = find_high_precision_weight(module)
    kind = name_layer_class(module)
    if weight is None or (kind == FLOAT8_LINEAR and casts.is_cast_in_forward(module)):
        return weight
    if kind == NVFP4_LINEAR:
        return weight if is_dtensor(weight) else weight.to(torch.bfloat16)
    return weight if is_dtensor(weight) else cast_like_autocast(weight)


def _grad(grad: torch.Tensor, *_: Any) -> torch.Tensor:
    return require_uncast_tensor(grad)


def _cast(module: nn.Module, kwargs: Kwargs, part: str, role: str, out: torch.Tensor) -> Any:
    use: CastInUse = casts.find_cast(module, role)  # read now, because this configuration also applies to the backward
    return lambda: use


def find_quantizing_engine(modules: Iterable[nn.Module]) -> str:
    """Return the engine that quantizes in training: torchao, "unknown" for unsupported classes, or "" without an engine."""
    classes = {name_layer_class(module): module for module in modules}
    if not classes or classes.keys() & {FLOAT8_LINEAR, MXFP8_LINEAR, NVFP4_LINEAR}:
        return BACKEND.name if classes else ""
    kind, module = next(iter(classes.items()))
    weight = read_raw_weight(module)
    held = (
        f" with weights of {find_class_path(getattr(weight, '_local_tensor', weight))}" if is_torchao_tensor(weight) else ""
    )
    return f"unknown: training with {kind}{held} is not supported"


BACKEND = FrameworkBackend(
    name="torchao",
    owns=_owns,
    input=_input,
    weight=_weight,
    output=lambda out: out[0] if isinstance(out, tuple) else out,
    grad=_grad,
    cast=_cast,
    untold=reset_cast_trials,
    has_own_fp8=True,
)

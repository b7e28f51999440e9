"""Foreign engine 7: what a later torchao, or somebody's extension of it, may do to the casts of a Float8Linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from foreign_engines.linear_subclasses import OwnFp8Linear
from foreign_engines.rounding import toward_zero
from foreign_engines.witness import WITNESS
from torch import nn
from torchao.float8 import Float8LinearConfig, float8_linear, float8_scaling_utils
from torchao.float8.float8_linear import Float8Linear

ROLES = {"INPUT": "input", "WEIGHT": "weight", "GRAD_OUTPUT": "grad_output"}
_cast = float8_linear.hp_tensor_to_float8_dynamic
Rule = Callable[[torch.Tensor], bool]


@dataclass(frozen=True)
class RoundedConfig(Float8LinearConfig):
    """A configuration with a field of its own."""

    rounding: str = "toward_zero"


class ClippedFloat8Linear(Float8Linear):
    """Clips X before it is cast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.clamp(-1, 1))


def _release(patch: pytest.MonkeyPatch, module: nn.Module, truncates: Rule, *, everywhere: bool = True) -> None:
    """A release that rounds toward zero where `truncates` says so, in its cast or, not everywhere, in its product only."""

    def cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = _cast(tensor, *args, **kwargs)
        if truncates(tensor):
            made._data = toward_zero(tensor.float() * made._scale, made._data.dtype)
        if WITNESS.step >= 0:
            value = made._data.float() / made._scale
            WITNESS.saw(module, ROLES[kwargs["gemm_input_role"].name], tensor, value, float(made._scale))
        return made

    patch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", cast)
    if everywhere:
        patch.setattr(float8_scaling_utils, "hp_tensor_to_float8_dynamic", cast)


def _float8(config: Float8LinearConfig, kind: type[Float8Linear] = Float8Linear) -> Float8Linear:
    return kind.from_float(nn.Linear(32, 32, bias=False).bfloat16(), config=config)


def unpatched(patch: pytest.MonkeyPatch) -> nn.Module:
    """torchao as it is, to show that what is compared is the same thing."""
    linear = _float8(Float8LinearConfig())
    _release(patch, linear, lambda tensor: False)
    return linear


def subclass(patch: pytest.MonkeyPatch) -> nn.Module:
    linear = _float8(Float8LinearConfig(), ClippedFloat8Linear)
    _release(patch, linear, lambda tensor: False)
    return linear


def field_of_config(patch: pytest.MonkeyPatch) -> nn.Module:
    linear = _float8(RoundedConfig())
    _release(patch, linear, lambda tensor: linear.config.rounding == "toward_zero")
    return linear


def other_rounding(patch: pytest.MonkeyPatch) -> nn.Module:
    """Nothing but the arithmetic is another."""
    linear = _float8(Float8LinearConfig())
    _release(patch, linear, lambda tensor: True)
    return linear


def other_rounding_in_product(patch: pytest.MonkeyPatch) -> nn.Module:
    """The function of the cast is as before; the product rounds by one of its own."""
    linear = _float8(Float8LinearConfig())
    _release(patch, linear, lambda tensor: True, everywhere=False)
    return linear


def large_tensors_only(patch: pytest.MonkeyPatch) -> nn.Module:
    """Another kernel from 1024 values on, as kernels that dispatch by size are."""
    linear = _float8(Float8LinearConfig())
    _release(patch, linear, lambda tensor: tensor.numel() >= 1024)
    return linear


def from_second_step(patch: pytest.MonkeyPatch) -> nn.Module:
    """The rounding changes while the run goes on."""
    linear = _float8(Float8LinearConfig())
    _release(patch, linear, lambda tensor: WITNESS.step >= 1)
    return linear


def replaced_forward(patch: pytest.MonkeyPatch) -> nn.Module:
    """A Float8Linear whose forward an engine has replaced."""
    linear = _float8(Float8LinearConfig())
    linear.forward = MethodType(OwnFp8Linear.forward, linear)
    return linear


ENGINES: dict[str, Callable[[pytest.MonkeyPatch], nn.Module]] = {
    function.__name__: function
    for function in (
        unpatched,
        subclass,
        field_of_config,
        other_rounding,
        other_rounding_in_product,
        large_tensors_only,
        from_second_step,
        replaced_forward,
    )
}

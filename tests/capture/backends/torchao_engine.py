"""What torchao itself casts: the codes and scales that its GEMMs multiply, seen where they are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_training_tensor import Float8TrainingTensor

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: operands in order of each product
PRODUCTS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}


@dataclass(frozen=True)
class Cast:
    """An operand as a GEMM of torchao gets it."""

    codes: torch.Tensor
    #: float32, broadcastable to the codes
    scale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """What the codes stand for, float64; a scale of 0 loses what it multiplies."""
        scale = self.scale.double()
        return torch.where(scale > 0, self.codes.double() / scale, 0.0)


class Multiplied(TorchDispatchMode):
    """Keeps what GEMMs multiply, in the order of execution; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype != torch.float64:  # which the monitor multiplies in
            self.pairs.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _turned(cast: Cast, turn: bool) -> Cast:
    return Cast(cast.codes.t(), cast.scale.t() if cast.scale.dim() else cast.scale) if turn else cast


def casts_of_a_layer(multiplied: Multiplied) -> dict[tuple[str, str], Cast]:
    """By (product, role), each operand as the matrix that its module knows: of one layer in one step."""
    found: dict[tuple[str, str], Cast] = {}
    assert len(multiplied.pairs) == 3
    for (product, roles), pair in zip(PRODUCTS.items(), multiplied.pairs, strict=True):
        for role, operand in zip(roles, pair, strict=True):
            if isinstance(operand, Float8TrainingTensor):
                assert operand._gemm_input_role.value == role
                turned = (product, role) in (("fprop", "weight"), ("wgrad", "grad_output"))
                found[product, role] = _turned(Cast(operand._data, operand._scale), turned)
    return found


@contextmanager
def multiplied() -> Iterator[Multiplied]:
    with Multiplied() as seen:
        yield seen


def configured(name: str, **options: Any) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(name), emulate=True, **options)


def float8(model: nn.Module, config: Float8LinearConfig) -> nn.Module:
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def operands(tokens: int, columns: int, outputs: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """With a loud token, a token of zeros, and one so small that its amax counts as torchao's epsilon."""
    of = torch.Generator().manual_seed(tokens + columns)
    x = torch.randn(tokens, columns, generator=of)
    dy = 1e-3 * torch.randn(tokens, outputs, generator=of).pow(3)
    x[0], x[1], x[2] = 3e3 * x[0], 0.0, 1e-14 * x[2]
    dy[3 % tokens] *= 1e5
    x[4] *= 2.0**-30
    x[4, 0] = 1.75 * 2.0**-20 * (1 + 2.0**-23)  # in float32 the scale of its row lies just below a power of two
    return {
        "input": x.to(dtype),
        "weight": torch.randn(outputs, columns, generator=of).to(dtype),
        "grad_output": dy.to(dtype),
    }


def config_of(name: str) -> Float8LinearConfig:
    if name in RECIPES:
        return configured(name)
    rowwise = ScalingGranularity.AXISWISE
    return {
        "tensorwise, powers of two": Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True),
        "rowwise, any scale, hybrid": Float8LinearConfig(
            cast_config_input=CastConfig(scaling_granularity=rowwise),
            cast_config_weight=CastConfig(scaling_granularity=rowwise),
            cast_config_grad_output=CastConfig(scaling_granularity=rowwise),
            emulate=True,
        ),
        "forward in high precision": Float8LinearConfig(
            cast_config_input=CastConfig(ScalingType.DISABLED),
            cast_config_weight=CastConfig(ScalingType.DISABLED),
            cast_config_input_for_grad_weight=CastConfig(),
            cast_config_weight_for_grad_input=CastConfig(),
            emulate=True,
        ),
    }[name]


def layer_of(name: str, given: dict[str, torch.Tensor], bias: bool = True) -> nn.Module:
    outputs, columns = given["weight"].shape
    layer = nn.Linear(columns, outputs, bias=bias, dtype=given["weight"].dtype)
    with torch.no_grad():
        layer.weight.copy_(given["weight"])
    model = float8(nn.Sequential(layer), config_of(name))
    assert type(model[0]).__name__ == "Float8Linear"
    return model

"""Transformer Engine's Linear and LayerNormLinear, and Megatron's wrappers, which inherit them.

Operands only: scales are not read from Transformer Engine yet, so figures are under an emulated scale. LayerNormLinear
normalises inside, so that its argument is not the GEMM's X, which is left out.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from .base import Args, Host, Kwargs, raw_weight
from .megatron import configured_recipe


def _owns(module: nn.Module) -> bool:
    te = sys.modules.get("transformer_engine.pytorch")
    return isinstance(module, tuple(getattr(te, name) for name in ("Linear", "LayerNormLinear") if hasattr(te, name)))


def _input(module: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    if isinstance(module, sys.modules["transformer_engine.pytorch"].LayerNormLinear):
        return None
    x: torch.Tensor = args[0] if args else kwargs["inp"]
    return x


def _output(out: Any) -> torch.Tensor:
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


HOST = Host(
    name="Transformer Engine Linear and LayerNormLinear",
    owns=_owns,
    input=_input,
    weight=lambda module, args, kwargs: raw_weight(module),
    output=_output,
    has_own_fp8=True,
    recipe=configured_recipe,
)

"""What the rest of the package asks of a host framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...numerics.scaling import Recipe

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """How to find a host's GEMM modules and their operands."""

    name: str
    #: whether a module is one of its GEMMs; the host is never imported from here
    owns: Callable[[nn.Module], bool]
    #: X from the arguments of a forward call; None where the module makes it inside
    input: Callable[[nn.Module, Args, Kwargs], torch.Tensor | None]
    #: W; never through `module.weight`, whose getter makes some sharding engines gather
    weight: Callable[[nn.Module, Args, Kwargs], torch.Tensor | None]
    #: the tensor whose gradient is dY, from what forward returned
    output: Callable[[Any], torch.Tensor]
    #: whether its modules quantise for themselves when told to
    has_own_fp8: bool = False
    #: the FP8 recipe that the module is configured for; None: none
    recipe: Callable[[nn.Module], Recipe | None] = lambda module: None


def raw_weight(module: nn.Module) -> torch.Tensor | None:
    """The parameter as the module holds it, without the getters of sharding engines; None where it is computed anew."""
    return dict.get(module._parameters, "weight")

"""What acts on each module at present, for those who report how its operands are cast."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..numerics.block_scaling import BlockRule
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling


class CastOverride(Protocol):
    """What casts the operands of a module instead of its engine."""

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """By role."""

    def quantizes(self, role: str) -> bool:
        """Whether `role` is cast at all."""

    def scale(self, role: str) -> torch.Tensor | CurrentScaling | BlockRule:
        """What `role` is cast with in the present step: a float32 scalar, or a rule that finds it from each tensor."""


#: modules whose operands are quantized by emulation
EMULATED: weakref.WeakKeyDictionary[nn.Module, CastOverride] = weakref.WeakKeyDictionary()
#: modules whose engine is told, in hooks that run after those that ask, to use another recipe of its own; None: none at all
SWITCHED: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def emulated(module: nn.Module) -> CastOverride | None:
    """The emulation that acts on `module`, if any."""
    return EMULATED.get(module)

"""What acts on each module at present, for those who report how its operands are cast."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ..interventions.emulate import EmulatedGemm

#: modules whose operands are quantised by emulation
EMULATED: weakref.WeakKeyDictionary[nn.Module, EmulatedGemm] = weakref.WeakKeyDictionary()
#: modules whose engine is told, in hooks that run after those that ask, to use another recipe of its own; None: none at all
SWITCHED: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def emulated(module: nn.Module) -> EmulatedGemm | None:
    """The emulation that acts on `module`, if any."""
    return EMULATED.get(module)

"""Which scale and format each operand is measured under: read from what quantizes it, or emulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.keys import ROLES, Key
from ..numerics.delayed_state import EmulatedScales
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse, make_unknown_cast, make_unquantized_cast
from .gemms import Gemm, is_seen_in_forward
from .patching import SWITCHED, find_emulation

#: what a run without FP8 is measured against: it needs nothing but the tensor itself
SHADOW = Recipe(CurrentScaling())


class Scales:
    """Answers, at the start of a sampled step, how each operand's scale will be known."""

    def __init__(self, gemms: Sequence[Gemm], recipe: Recipe | None, asked: str | Mapping[str, Any]) -> None:
        """
        Args:
            gemms: of this rank.
            recipe: what to measure against, whatever the run uses; None: what the run itself uses.
            asked: how the user wrote it.
        """
        #: whether what the run itself uses is measured
        self.auto = recipe is None
        configured = [r for g in gemms if (r := g.backend.recipe(g.module))]
        recipes = [e.recipes[role] for g in gemms if (e := find_emulation(g.module)) for role in ROLES if e.quantizes(role)]
        engines = [r for r, _ in Counter(recipes).most_common(1)]
        #: of operands that nothing quantizes, or whose scale cannot be read
        self._recipe = recipe or (engines + configured + [SHADOW])[0]
        self._emulated = EmulatedScales(self._recipe, ())
        self.description = {
            "asked": asked if isinstance(asked, str) else dict(asked),
            "measured_against": self._recipe.name,
            "gemms_quantized_by_emulation": sum(
                any(map(e.quantizes, ROLES)) for g in gemms if (e := find_emulation(g.module))
            ),
            "gemms_switched_in_engine": sum(g.module in SWITCHED for g in gemms),
            "configured_in_backend": configured[0].name if configured else None,
        }

    def emulate(self, keys: Sequence[Key]) -> None:
        """Keep histories of these operands: those of all ranks that measure together."""
        self._emulated = EmulatedScales(self._recipe, keys)

    def in_use(self, gemm: Gemm, role: str) -> ScaleInUse:
        """How operand `role` of `gemm` is cast in the step that begins."""
        if self.auto and (engine := find_emulation(gemm.module)):
            if not engine.quantizes(role):
                return make_unquantized_cast(role)
            recipe = engine.recipes[role]
            return ScaleInUse(engine.scale(role), recipe.format_of(role), recipe, "engine")
        if self.auto and gemm.backend.foreign(gemm.module) and not is_seen_in_forward(gemm):
            return make_unknown_cast(role)
        scale = self._emulated.next_scale((gemm.name, role))
        source = "emulated" if isinstance(scale, torch.Tensor) else "current"
        return ScaleInUse(scale, self._recipe.format_of(role), self._recipe, source)

    def observe(self, amax: Mapping[Key, float]) -> None:
        """End of a sampled step: emulated histories take the amax of each operand."""
        self._emulated.observe(list(amax), torch.tensor(list(amax.values()), dtype=torch.float32))

"""Choose the scale and format for measuring each operand. They are read from the operand's quantizer, or emulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..core.keys import ROLES, Key
from ..numerics.delayed_state import EmulatedScales
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import CastInUse, make_unknown_cast, make_unquantized_cast
from .gemms import Gemm, is_observed_in_forward
from .patching import SWITCHED, find_emulation

#: recipe for measuring a run without FP8. It needs no history, only the tensor itself
SHADOW = Recipe(CurrentScaling())


class CastChooser:
    """The choice of how to determine each operand's scale, made at the start of a sampled step."""

    def __init__(self, gemms: Sequence[Gemm], recipe: Recipe | None, asked: str | Mapping[str, Any]) -> None:
        """
        Args:
            gemms: GEMMs of this rank.
            recipe: recipe under which to measure, or None to measure the run's own casts.
            asked: the recipe as the user wrote it.
        """
        #: whether to measure the run's own casts
        self.auto = recipe is None
        configured = [r for g in gemms if (r := g.backend.recipe(g.module))]
        recipes = [e.recipes[role] for g in gemms if (e := find_emulation(g.module)) for role in ROLES if e.quantizes(role)]
        engines = [r for r, _ in Counter(recipes).most_common(1)]
        #: recipe for operands that nothing quantizes, or whose scale cannot be read
        self._recipe = recipe or (engines + configured + [SHADOW])[0]
        self._emulated = EmulatedScales(self._recipe, ())
        self.description = {
            "asked": asked if isinstance(asked, str) else dict(asked),
            "measured_against": self._recipe.name,
            "gemms_quantized_by_emulation": sum(
                any(map(e.quantizes, ROLES)) for g in gemms if (e := find_emulation(g.module))
            ),
            "gemms_switched_in_engine": sum(g.module in SWITCHED for g in gemms),
            "planned": {g.name: list(roles) for g in gemms if (roles := _list_planned_roles(g))},
            "configured_in_backend": configured[0].name if configured else None,
        }

    def start_amax_histories(self, keys: Sequence[Key]) -> None:
        """Keep amax histories of these operands, including operands on other ranks that measure the same tensors."""
        self._emulated = EmulatedScales(self._recipe, keys)

    def choose_operand_cast(self, gemm: Gemm, role: str) -> CastInUse:
        """Return how operand `role` of `gemm` is cast in the step that is beginning."""
        if self.auto and (engine := find_emulation(gemm.module)):
            if not engine.quantizes(role):
                return make_unquantized_cast(role)
            recipe = engine.recipes[role]
            return CastInUse(engine.scale(role), recipe.get_format(role), recipe, "engine")
        if self.auto and gemm.backend.foreign(gemm.module) and not is_observed_in_forward(gemm):
            return make_unknown_cast(role)
        scale = self._emulated.next_scale((gemm.name, role))
        source = "emulated" if isinstance(scale, torch.Tensor) else "current"
        return CastInUse(scale, self._recipe.get_format(role), self._recipe, source)

    def update_amax_histories(self, amax: Mapping[Key, float]) -> None:
        """End a sampled step: add the amax of each operand to emulated histories."""
        self._emulated.update_amax_histories(list(amax), torch.tensor(list(amax.values()), dtype=torch.float32))


def _list_planned_roles(gemm: Gemm) -> Collection[str]:
    """Return the roles of a GEMM whose recipe a plan chose."""
    engine = find_emulation(gemm.module)
    return ROLES if gemm.module in SWITCHED else () if engine is None else engine.planned_roles

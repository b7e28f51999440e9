"""Which scale and format each operand is measured under: read from what quantises it, or emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..interventions.emulate import emulated
from ..numerics.scaling import CurrentScaling, DelayedScaling, DelayedState, Recipe, parse_recipe
from .layers import Gemm
from .operands import Operand, ScaleInUse

#: what a run without FP8 is measured against: it needs nothing but the tensor itself
SHADOW = Recipe(CurrentScaling())


class Scales:
    """Answers, at the start of a sampled step, how each operand's scale will be known."""

    def __init__(self, gemms: Sequence[Gemm], roles: Sequence[str], recipe: str | Mapping[str, Any]) -> None:
        """
        Args:
            recipe: "auto", or what to measure against whatever the run uses.
        """
        self._auto = recipe == "auto"
        configured = [r for g in gemms if (r := g.host.recipe(g.module))]
        engines = [e.recipe for g in gemms if (e := emulated(g.module))]
        #: of operands that nothing quantises, or whose scale cannot be read
        self._recipe = parse_recipe(recipe) if not self._auto else (engines + configured + [SHADOW])[0]
        self._history = DelayedState(self._recipe, [(g.name, role) for g in gemms for role in roles])
        self._seen: set[tuple[str, str]] = set()
        self.description = {
            "asked": recipe if isinstance(recipe, str) else dict(recipe),
            "measured_against": self._recipe.name,
            "gemms_quantised_by_emulation": len(engines),
            "configured_in_host": configured[0].name if configured else None,
        }

    def in_use(self, gemm: Gemm, role: str) -> ScaleInUse:
        """How operand `role` of `gemm` is cast in the step that begins."""
        if self._auto and (engine := emulated(gemm.module)):
            return ScaleInUse(engine.scale(role), engine.recipe.format_of(role), engine.recipe.name, "engine")
        fmt = self._recipe.format_of(role)
        scaling = self._recipe.scaling
        if isinstance(scaling, CurrentScaling):
            return ScaleInUse(scaling, fmt, self._recipe.name, "current")
        if (gemm.name, role) not in self._seen:
            return ScaleInUse(CurrentScaling(), fmt, self._recipe.name, "current")
        scale = self._history.scale[self._history.index[gemm.name, role]]
        return ScaleInUse(scale, fmt, self._recipe.name, "emulated")

    def observe(self, operands: Sequence[Operand], amax: torch.Tensor) -> None:
        """End of a sampled step: emulated histories take the amax (float32 [B]) of each operand."""
        if not isinstance(self._recipe.scaling, DelayedScaling):
            return
        for operand, value in zip(operands, amax, strict=True):
            key = (operand.gemm.name, operand.role)
            self._history.amax[self._history.index[key]] = value
            self._seen.add(key)
        self._history.update()

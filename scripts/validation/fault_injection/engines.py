"""What casts the operands of a run: the package's emulation, or Transformer Engine over emulated kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.interventions.emulate import EmulatedGemm, Emulation
from nemo_fp8_debug.numerics.delayed_state import DelayedState
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import DelayedScaling
from nemo_fp8_debug.plan.plan import NO_CHANGES, Plan

#: recipe of the emulation, or Megatron's options for Transformer Engine, by engine
RECIPES = {
    "delayed": "delayed(amax_history_len=16)",
    "current": "current",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "te-delayed": {"fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "te-current": {"fp8_recipe": "tensorwise"},
}
ENGINES = (*RECIPES, *OPTIONS)


class EmulatedEngine:
    """Hooks that quantize."""

    def __init__(self, gemms: Sequence[Gemm], recipe: str, plan: Plan = NO_CHANGES) -> None:
        self._of, self._recipe = gemms, parse_recipe(recipe)
        self._emulation = Emulation.from_gemms(gemms, self._recipe, plan)
        self._emulation.attach()

    @property
    def gemms(self) -> Sequence[EmulatedGemm]:
        """What casts the operands of each GEMM."""
        return self._emulation._gemms

    def gemm(self, layer: str) -> EmulatedGemm:
        """What casts the operands of a GEMM."""
        return next(gemm for gemm in self.gemms if gemm.gemm.name == layer)

    def slot(self, layer: str, role: str) -> tuple[Any, int] | None:
        """Return where the delayed scale of an operand is kept; None: it is cast otherwise."""
        for state in self._emulation.states.values():
            if (layer, role) in state.index:
                return state, state.index[layer, role]
        return None

    def keep_histories(self, recipe: Recipe, operands: Sequence[tuple[str, str]]) -> None:
        """Operands are cast by another recipe from here on; one with a history takes over what is known of them."""
        if not isinstance(recipe.scaling, DelayedScaling):
            return
        states, saved = self._emulation.states, self._emulation.state_dict()["states"]
        known = states.get(recipe)
        if known is None or not set(operands) <= set(known.columns):
            states[recipe] = known = DelayedState(recipe, operands)
        for part in saved:
            known.load_state_dict(part)

    def follow(self, plan: Plan) -> None:
        """Cast as a plan says from here on."""
        saved = self._emulation.state_dict()
        self._emulation.detach()
        self._emulation = Emulation.from_gemms(self._of, self._recipe, plan)
        self._emulation.load_state_dict(saved)
        self._emulation.attach()

    def end_step(self) -> None:
        """All gradients are there."""
        self._emulation.end_step()

    def detach(self) -> None:
        """The run is over."""
        self._emulation.detach()


class TransformerEngine:
    """Modules that quantize for themselves."""

    def __init__(self, gemms: Sequence[Gemm]) -> None:
        self._modules = {gemm.name: gemm.module for gemm in gemms}

    def slot(self, layer: str, role: str) -> tuple[Any, int] | None:
        metadata: Any = self._modules[layer].fp8_meta
        state = metadata["scaling_bwd" if role == "grad_output" else "scaling_fwd"]
        return (state, 1 if role == "weight" else 0) if hasattr(state, "amax_history") else None

    def end_step(self) -> None:
        """It moves its scales on by itself."""

    def detach(self) -> None:
        """Nothing was changed."""

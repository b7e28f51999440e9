"""Emulate FP8 without an FP8 engine: quantize operands by a recipe, and run the GEMM itself in high precision.

On a GPU, emulation shows whether quantization or the FP8 software causes a problem. On a CPU, it makes FP8 training
possible. Delayed scales change once per step (in Transformer Engine, once per micro-batch). So activation recomputation
uses the same scale as the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..capture.gemms import Gemm, find_gemms, match_gemms_by_name, require_matching_gemms
from ..capture.patching import EMULATED
from ..capture.tracing import CopySafeHook
from ..core.arguments import quote_names
from ..core.keys import ROLES
from ..distributed import MonitoredRanks
from ..errors import ConfigError, warn
from ..kernels import amax, quantize_dequantize
from ..numerics.block_scaling import BlockScalingRule
from ..numerics.delayed_state import DelayedState
from ..numerics.nvfp4_scaling import NVFP4Scaling
from ..numerics.recipe import Recipe, parse_recipe
from ..numerics.tensor_scaling import CurrentScaling, DelayedScaling, Unscaled
from ..plan.plan import NO_CHANGES, AnyPlan, Plan, read_plan_in_force

#: number of optimizer steps without an update of the scales after which we warn
_STEPS_WITHOUT_UPDATE = 10


class _StraightThrough(torch.autograd.Function):
    """A function whose forward returns the quantized values, and whose backward returns the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[0], None


def _straight_through(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _StraightThrough.apply(x, quantized)  # type: ignore[no-untyped-call]
    return result


class EmulatedGemm:
    """One GEMM module that multiplies quantized X, W and dY. Each operand has its own recipe."""

    def __init__(
        self, gemm: Gemm, recipes: Mapping[str, Recipe], states: Mapping[Recipe, DelayedState], usual: Recipe
    ) -> None:
        """
        Args:
            recipes: recipe of each role. An operand with the recipe `bf16` is not quantized.
            states: amax histories, by delayed recipe.
            usual: recipe of all operands that no plan changes.
        """
        self.gemm = gemm
        self.recipes = recipes
        self.planned_roles = [role for role, recipe in recipes.items() if recipe != usual]
        self._states = states
        self._own_weight: torch.Tensor | None = None
        self._swapped = False

    def quantizes(self, role: str) -> bool:
        """Return whether `role` is cast."""
        return not isinstance(self.recipes[role].scaling, Unscaled)

    def _history(self, role: str) -> tuple[DelayedState, int]:
        state = self._states[self.recipes[role]]
        return state, state.index[self.gemm.name, role]

    def scale(self, role: str) -> torch.Tensor | CurrentScaling | BlockScalingRule:
        """Return how `role` is cast in the current step: a float32 scale, or the rule that computes each tensor's scale."""
        scaling = self.recipes[role].scaling
        if isinstance(scaling, (CurrentScaling, BlockScalingRule)):
            return scaling
        state, slot = self._history(role)
        return state.scale[slot]

    def attach(self) -> list[RemovableHandle]:
        """Install the hooks that quantize, and return their handles."""
        EMULATED[self.gemm.module] = self
        return [
            self.gemm.module.register_forward_pre_hook(CopySafeHook(self._before_forward), with_kwargs=True),
            self.gemm.module.register_forward_hook(CopySafeHook(self._after_forward), always_call=True),
        ]

    def quantize(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """Return the values that the GEMM multiplies instead of `x`."""
        scaling, fmt = self.recipes[role].scaling, self.recipes[role].get_format(role)
        if not x.numel():
            return x
        if isinstance(scaling, BlockScalingRule):
            return scaling.quantize(x.detach(), role, fmt).dequantize().to(x.dtype)
        x = x.detach()
        largest = amax(x)
        if isinstance(scaling, CurrentScaling):
            return quantize_dequantize(x, scaling.compute_scale(largest, fmt.max), fmt)
        state, slot = self._history(role)
        if role == "grad_output" or torch.is_grad_enabled():  # evaluation does not change the history
            state.amax[slot] = torch.maximum(state.amax[slot], largest)
        return quantize_dequantize(x, state.scale[slot], fmt)

    def restore(self) -> None:
        """Restore the module's own weight. `detach` does this too, because a keyboard interrupt in a forward skips hooks."""
        if self._swapped:
            self.gemm.module._parameters["weight"] = self._own_weight  # type: ignore[assignment]
            self._own_weight, self._swapped = None, False

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backend = self.gemm.backend
        if self.quantizes("input"):
            x = backend.input(module, args, kwargs, "")
            assert x is not None  # X is None only in backends with their own FP8, which `_check` refuses
            quantized_x = _straight_through(x, self.quantize("input", x))
            args = tuple(quantized_x if a is x else a for a in args)
            kwargs = {k: quantized_x if v is x else v for k, v in kwargs.items()}
        weight = backend.weight(module, args, kwargs, "") if self.quantizes("weight") else None
        if weight is not None:
            quantized_weight = _straight_through(weight, self.quantize("weight", weight))
            args = tuple(quantized_weight if a is weight else a for a in args)
            kwargs = {k: quantized_weight if v is weight else v for k, v in kwargs.items()}
            if weight is module._parameters.get("weight"):
                # The module reads its weight itself, so we put the quantized weight there for this call.
                self._own_weight, self._swapped = module._parameters["weight"], True
                module._parameters["weight"] = quantized_weight  # type: ignore[assignment]
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.restore()
        if out is None:  # the forward raised
            return
        y = self.gemm.backend.output(out)
        if y.requires_grad and self.quantizes("grad_output"):
            y.register_hook(lambda grad: self.quantize("grad_output", grad))


class Emulation:
    """FP8 training on any hardware. Between `attach` and `detach`, a model's GEMM operands are cast to FP8 and back.

    GEMMs multiply the cast values in the run's own precision. Casts of X and W pass gradients on unchanged.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> emulation = Emulation(model, recipe="delayed")
        >>> emulation.attach()
        >>> model(torch.ones(4, 32)).sum().backward()
        >>> emulation.end_step()
        >>> emulation.detach()
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        recipe: str | Mapping[str, Any] | Recipe = "delayed",
        layers: Sequence[str] | None = None,
        plan: AnyPlan | None = None,
    ) -> None:
        """
        Args:
            model: the model, or a list of its chunks if a virtual pipeline splits it.
            recipe: the FP8 recipe: a name, perhaps with options (`delayed(amax_history_len=16)`, `current-e5m2`, `mxfp8`),
                or a dict (`{"name": "delayed", "margin": 1}`).
            layers: GEMMs to quantize, a list of patterns as in `Config.layers`, or None for all.
            plan: changes to the casts of some operands: a `Plan`, the path of its file, or None. If `nemo-fp8-debug rescue`
                started the run, the plan of `rescue` is used instead. `multiply_in_bf16` has no effect, because emulated
                GEMMs never multiply FP8.

        Raises:
            ConfigError: the recipe cannot be used or emulated, no GEMM matches, the plan names a layer that is not a GEMM,
                or a GEMM has its own FP8 or fuses gradient accumulation.
        """
        found = find_gemms([model] if isinstance(model, nn.Module) else model)
        gemms, plan = require_matching_gemms(found, layers), read_plan_in_force(plan) or NO_CHANGES
        check_changes_name_gemms(plan, gemms, "that this run quantizes")
        self._prepare(gemms, parse_recipe(recipe), plan)

    @classmethod
    def from_gemms(cls, gemms: Iterable[Gemm], recipe: Recipe, plan: Plan = NO_CHANGES) -> Emulation:
        """Return an emulation of FP8 for GEMMs that are already known. Internal.

        Args:
            gemms: GEMMs to quantize.
            recipe: recipe of all operands that the plan does not change.
            plan: changes to the casts of some operands.

        Raises:
            ConfigError: a recipe cannot be emulated, or a GEMM has its own FP8 or fuses gradient accumulation.
        """
        emulation = cls.__new__(cls)
        emulation._prepare(gemms, recipe, plan)
        return emulation

    def _prepare(self, gemms: Iterable[Gemm], recipe: Recipe, plan: Plan) -> None:
        self.recipe = recipe
        gemms = list(gemms)
        recipes = {g.name: {role: plan.recipe_of(g.name, role, recipe) for role in ROLES} for g in gemms}
        columns: dict[Recipe, list[tuple[str, str]]] = {}
        for name, by_role in recipes.items():
            for role, chosen in by_role.items():
                if isinstance(chosen.scaling, DelayedScaling):
                    columns.setdefault(chosen, []).append((name, role))
        device = next((p.device for g in gemms for p in g.module.parameters()), None)
        #: amax histories, by delayed recipe
        self.states = {delayed: DelayedState(delayed, keys, device) for delayed, keys in columns.items()}
        self._gemms = [EmulatedGemm(g, recipes[g.name], self.states, recipe) for g in gemms]
        for gemm in self._gemms:
            _check(gemm)
        self._handles: list[RemovableHandle] = []
        #: steps of optimizers before the first call of `end_step`; None after this call
        self._steps_without_update: int | None = 0

    def attach(self) -> None:
        """Start quantizing."""
        for gemm in self._gemms:
            self._handles += gemm.attach()
        if self.states:
            # This hook lasts until the process ends, so it must not keep the model alive.
            self._handles.append(register_optimizer_step_post_hook(partial(_count_step, weakref.ref(self))))

    def detach(self) -> None:
        """Restore the model."""
        for handle in self._handles:
            handle.remove()
        for gemm in self._gemms:
            gemm.restore()
            EMULATED.pop(gemm.gemm.module, None)
        self._handles = []

    def end_step(self) -> None:
        """Update delayed scales. Call this once after each step's backward."""
        self._steps_without_update = None
        for state in self.states.values():
            state.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same scales."""
        return {"states": [state.state_dict() for state in self.states.values()]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the saved histories of all operands that have a history now, even if they were saved under other recipes.

        Args:
            saved: the result of `state_dict`.

        Example:
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
            >>> saved = Emulation(model).state_dict()
            >>> resumed = Emulation(model, "delayed(amax_history_len=16)")
            >>> resumed.load_state_dict(saved)
        """
        for part in saved.get("states", [saved]):  # earlier releases had one state, saved directly
            for state in self.states.values():
                state.load_state_dict(part)


def _count_step(emulation: weakref.ref[Emulation], *_: Any) -> None:
    """Warn once if optimizers step, but nothing updates the delayed scales."""
    one = emulation()
    if one is None or one._steps_without_update is None:
        return
    one._steps_without_update += 1
    if one._steps_without_update == _STEPS_WITHOUT_UPDATE:
        warn(
            f"the optimizer has made {_STEPS_WITHOUT_UPDATE} steps, but `Emulation.end_step` was never called, so all "
            "delayed scales are still 1. Call `end_step()` after each step's backward"
        )


def _check(emulated: EmulatedGemm) -> None:
    gemm = emulated.gemm
    if gemm.backend.has_own_fp8:
        raise ConfigError(
            f"{gemm.name} is a module of {gemm.backend.name}, which does its own quantization; "
            "emulate FP8 only in modules without FP8, such as the modules of Megatron's local layer spec"
        )
    if getattr(gemm.module, "gradient_accumulation_fusion", False) and emulated.quantizes("weight"):
        raise ConfigError(
            f"{gemm.name} uses gradient_accumulation_fusion, which FP8 emulation does not support; "
            "set gradient_accumulation_fusion=False"
        )
    for recipe in emulated.recipes.values():
        if isinstance(recipe.scaling, NVFP4Scaling):
            _check_nvfp4(recipe, recipe.scaling)


def _check_nvfp4(recipe: Recipe, scaling: NVFP4Scaling) -> None:
    """Raise ConfigError for stochastic rounding and for options of column-wise copies.

    Emulation always multiplies row-wise codes that are rounded to nearest.
    """
    carried_out = replace(scaling, stochastic=False, hadamard="")
    ignored = [name for name in ("hadamard", "stochastic") if getattr(scaling, name) != getattr(carried_out, name)]
    if ignored:
        raise ConfigError(
            f"FP8 emulation does not emulate {' and '.join(ignored)} of {recipe.name!r}; "
            f"use {Recipe(carried_out, recipe.fp8_format).name!r}, or train with Transformer Engine"
        )


def check_changes_name_gemms(plan: Plan, gemms: Sequence[Gemm], which: str) -> None:
    """Check that each change names a GEMM on at least one rank.

    Args:
        gemms: GEMMs of this rank that can be changed.
        which: clause that describes these GEMMs in the message, such as "that this run quantizes".

    Raises:
        ConfigError: a change names no GEMM on any rank.
    """
    if not plan.changes:
        return
    ranks, mine = MonitoredRanks(), [bool(match_gemms_by_name(gemms, [change.layer])) for change in plan.changes]
    of_all = [mine]
    if ranks.world > 1:
        ranks.publish_value(f"named/{ranks.rank}", mine)
        ranks.await_all_monitors({})
        of_all = ranks.read_values_of_all_ranks("named") if ranks.world > 1 else [mine]
        ranks.close()
    for change, *named in zip(plan.changes, *of_all, strict=True):
        if not any(named):
            names = quote_names([g.name for g in gemms]) or "none"
            raise ConfigError(f"{change.layer!r} in the plan is not a GEMM {which}; the GEMMs {which} are: {names}")

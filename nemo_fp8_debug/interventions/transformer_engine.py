"""Apply a plan in a run that Transformer Engine quantizes, by running single modules inside additional `autocast` contexts.

| part of a plan | what is done |
|---|---|
| `bf16` | the module's forward runs in `autocast(enabled=False)` |
| another recipe | the module's forward runs in `autocast(enabled=True, recipe=...)` |
| `multiply_in_bf16` | as for `bf16`, and emulation quantizes the module's operands |

We change only calls that the run itself makes in FP8, so our contexts are nested in the run's own context. When the run's
context ends, Transformer Engine reduces the amaxes of delayed scaling, and updates each module's scales by its own recipe.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..capture.backends.base import read_raw_weight
from ..capture.backends.transformer_engine import LINEAR
from ..capture.backends.transformer_engine.casts import find_state_manager
from ..capture.backends.transformer_engine.linear import get_first_argument
from ..capture.gemms import Gemm
from ..capture.patching import SWITCHED
from ..capture.tracing import CopySafeHook
from ..core.keys import ROLES
from ..errors import ConfigError, warn
from ..numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from ..numerics.formats import E5M2
from ..numerics.nvfp4_scaling import NVFP4Scaling
from ..numerics.recipe import BF16_RECIPE, Recipe
from ..numerics.tensor_scaling import CurrentScaling, DelayedScaling, Unscaled
from ..plan.plan import Change, Plan
from .emulate import Emulation

_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
#: options of rules that Transformer Engine's recipes lack, or cannot set for all operands
_NOT_THERE = ("by_logarithm", "stochastic", "hadamard", "row_scaled", "four_over_six")
_OPERANDS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def make_te_recipe(recipe: Recipe) -> Any:
    """Return a Transformer Engine recipe that agrees with `recipe` in all options that Transformer Engine's recipes have.

    Raises:
        ConfigError: this version has no such recipe, or the device cannot run it. The message gives the reason.
    """
    known = sys.modules["transformer_engine.common.recipe"]
    kind = _CLASSES.get(recipe.name.partition("-")[0].partition("(")[0])
    if kind is None or any(getattr(recipe.scaling, option, False) for option in _NOT_THERE):
        raise ConfigError(f"Transformer Engine has no recipe that casts as {recipe.name!r} requires")
    if not hasattr(known, kind):
        raise ConfigError(f"this version of Transformer Engine has no {kind}, which {recipe.name!r} requires")
    if recipe.fp8_format == E5M2.name:
        raise ConfigError(f"Transformer Engine cannot cast all operands to E5M2, as {recipe.name!r} requires")
    try:
        made = getattr(known, kind)(**_options(recipe, known))
        _set_operands(made, recipe, known)
        with torch.no_grad(), autocast(made):  # Transformer Engine checks the device here
            pass
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Transformer Engine cannot cast as {recipe.name!r} requires: {reason}") from None
    return made


def _options(recipe: Recipe, known: Any) -> dict[str, Any]:
    rule = recipe.scaling
    has_format = isinstance(rule, (CurrentScaling, DelayedScaling, Float8BlockScaling, MXFP8Scaling))
    options: dict[str, Any] = {"fp8_format": getattr(known.Format, recipe.fp8_format.upper())} if has_format else {}
    if isinstance(rule, DelayedScaling):
        names = ("margin", "amax_history_len", "amax_compute_algo")
        options |= {name: getattr(rule, name) for name in names}
    if isinstance(rule, Float8BlockScaling) and rule.dimensions:
        options |= {f"{operand}_block_scaling_dim": rule.dimensions for operand in ("x", "w", "grad")}
    if isinstance(rule, MXFP8Scaling) and rule.square_weights:
        options["enable_2d_quantization"] = True
    if isinstance(rule, NVFP4Scaling) and not rule.square_weights:
        options["disable_2d_quantization"] = True
    return options


def _set_operands(made: Any, recipe: Recipe, known: Any) -> None:
    """Set the options that a recipe has for each operand. By default, Transformer Engine reads them from the environment."""
    rule = recipe.scaling
    if isinstance(rule, (CurrentScaling, Float8BlockScaling)):
        for name in _OPERANDS:
            setattr(made, name, known.QParams(power_2_scale=rule.power_of_two, amax_epsilon=rule.epsilon))


def autocast(recipe: Any) -> Any:
    """Return an `autocast` context of Transformer Engine for `recipe`, or for high precision if `recipe` is None."""
    te = sys.modules["transformer_engine.pytorch"]
    manager = find_state_manager()
    group, graph = manager.get_fp8_group(), manager.fp8_graph_capturing()
    if hasattr(te, "autocast"):  # version 2.9 and later
        return te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group, _graph=graph)
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, fp8_group=group, _graph=graph)


#: backend for GEMMs of Transformer Engine modules that run in high precision
_PLAIN = replace(
    LINEAR,
    input=lambda module, args, kwargs, part: get_first_argument(args, kwargs),
    weight=lambda module, args, kwargs, part: read_raw_weight(module),
    has_own_fp8=False,
)


class EngineChanges:
    """The changes of a plan to Transformer Engine modules. They are in force between `attach` and `detach`."""

    def __init__(self, gemms: Iterable[Gemm], plan: Plan) -> None:
        """
        Args:
            gemms: GEMMs of the model. We ignore GEMMs of other frameworks.

        Raises:
            ConfigError: a change of the plan is impossible with this version of Transformer Engine, on this device, or
                because the weight is stored in FP8.
        """
        by_module: dict[nn.Module, list[Gemm]] = defaultdict(list)
        for gemm in gemms:
            if gemm.backend.takes_plans:
                by_module[gemm.module].append(gemm)
        chosen = {module: change for module, own in by_module.items() if (change := _whole(own, plan))}
        for module, change in chosen.items():
            _check(by_module[module], change)
        _say_what_is_widened({m: by_module[m] for m in chosen}, plan)
        self._switches = [_Switch(module, change) for module, change in chosen.items()]
        multiplied = [by_module[m][0] for m, c in chosen.items() if c.multiply_in_bf16 and not _is_bf16(c)]
        self._emulation = _emulation(multiplied, [chosen[g.module] for g in multiplied])
        #: number of changed modules
        self.count = len(chosen)

    def attach(self) -> None:
        """Start changing calls."""
        for switch in self._switches:
            switch.attach()
        self._emulation.attach()

    def detach(self) -> None:
        """Restore the model."""
        self._emulation.detach()
        for switch in self._switches:
            switch.detach()

    def end_step(self) -> None:
        """Update the delayed scales of emulated operands. Call this once after each step's backward."""
        self._emulation.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scales of emulated operands. Transformer Engine saves its own scales with the model."""
        return self._emulation.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the scales of a checkpoint."""
        self._emulation.load_state_dict(saved)


class _Switch:
    """Hooks that switch the recipe for the calls of one module."""

    def __init__(self, module: nn.Module, change: Change) -> None:
        self._module = module
        recipe = change.parsed_recipe
        off = change.multiply_in_bf16 or isinstance(recipe.scaling, Unscaled)
        self._recipe = None if off else make_te_recipe(recipe)
        self._entered: Any = None
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        SWITCHED[self._module] = self._recipe
        self._handles = [
            self._module.register_forward_pre_hook(CopySafeHook(self._enter)),
            self._module.register_forward_hook(CopySafeHook(self._leave), always_call=True),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        SWITCHED.pop(self._module, None)
        self._handles = []

    def _enter(self, *_: Any) -> None:
        if find_state_manager().is_fp8_enabled():
            self._entered = autocast(self._recipe)
            self._entered.__enter__()

    def _leave(self, *_: Any) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


def _whole(gemms: Sequence[Gemm], plan: Plan) -> Change | None:
    """Return the change for a whole module. If its operands have several changes, prefer BF16, then the last one."""
    found = [change for gemm in gemms for role in ROLES if (change := plan.change_of(gemm.name, role))]
    if not found:
        return None
    return max(filter(_is_bf16, found), default=max(found, key=plan.changes.index), key=plan.changes.index)


def _is_bf16(change: Change) -> bool:
    return isinstance(change.parsed_recipe.scaling, Unscaled)


def _say_what_is_widened(modules: dict[nn.Module, list[Gemm]], plan: Plan) -> None:
    wide = [g.name for own in modules.values() for g in own if _differs(own, plan)]
    if wide:
        warn(
            f"Transformer Engine casts all operands of a module or none; changes of some operands of "
            f"{len(wide)} GEMMs (first {wide[0]}) apply to all their operands"
        )


def _differs(gemms: Sequence[Gemm], plan: Plan) -> bool:
    changes = [plan.change_of(gemm.name, role) for gemm in gemms for role in ROLES]
    return len({change and (change.recipe, change.multiply_in_bf16) for change in changes}) > 1


def _check(gemms: Sequence[Gemm], change: Change) -> None:
    gemm = gemms[0]
    if gemm.compiled:
        raise ConfigError(f"{gemm.name} runs inside torch.compile, where a plan cannot change it; do not compile it")
    if any("weight" in g.unobserved_roles or g.backend.stored(g.module, g.part) for g in gemms):
        raise ConfigError(
            f"W of {gemm.name} is stored in FP8, which a plan cannot change; start the run with weights in BF16 "
            "(Megatron: fp8_param=False)"
        )
    if (
        change.multiply_in_bf16
        and not _is_bf16(change)
        and (gemm.backend is not LINEAR or read_raw_weight(gemm.module) is None)
    ):
        raise ConfigError(f"multiply_in_bf16 cannot reach the operands of {gemm.name}, a {type(gemm.module).__name__}")
    fused = getattr(gemm.module, "fuse_wgrad_accumulation", False)
    if change.multiply_in_bf16 and fused and not _is_bf16(change):
        raise ConfigError(
            f"{gemm.name} fuses gradient accumulation, which multiply_in_bf16 does not support; "
            "set gradient_accumulation_fusion=False"
        )


def _emulation(gemms: Sequence[Gemm], changes: Sequence[Change]) -> Emulation:
    """Return the emulation that quantizes operands of modules without their own FP8."""
    normalize = [g for g in gemms if hasattr(g.module, "layer_norm_weight")]
    if normalize:
        warn(
            f"X of {len(normalize)} layers (first {normalize[0].name}) is computed inside a fused norm, where "
            "multiply_in_bf16 cannot quantize it; X stays in BF16, W and dY are quantized"
        )
    made_inside = [Change(g.name, "bf16", ("input",)) for g in normalize]
    by_name = [Change(g.name, change.recipe) for g, change in zip(gemms, changes, strict=True)]
    plain = [replace(gemm, backend=_PLAIN) for gemm in gemms]
    return Emulation.from_gemms(plain, BF16_RECIPE, Plan((*by_name, *made_inside)))

"""Our recipes as Transformer Engine's, and its context around a call."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..capture.backends.transformer_engine.casts import state_manager
from ..errors import ConfigError
from ..numerics.block_scaling import BlockScaling, MXFP8Scaling
from ..numerics.formats import E5M2
from ..numerics.nvfp4_scaling import NVFP4Scaling
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling, DelayedScaling

_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
#: options of rules for which it has none, or none that holds of all operands
_NOT_THERE = ("by_logarithm", "stochastic", "hadamard", "row_scaled", "four_over_six")
_OPERANDS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def te_recipe(recipe: Recipe) -> Any:
    """The recipe of Transformer Engine that casts as `recipe` says, as far as a recipe of its has a say in it.

    Raises:
        ConfigError: this version has none, or the device cannot run it; says which and why.
    """
    known = sys.modules["transformer_engine.common.recipe"]
    kind = _CLASSES.get(recipe.name.partition("-")[0].partition("(")[0])
    if kind is None or any(getattr(recipe.scaling, option, False) for option in _NOT_THERE):
        raise ConfigError(f"Transformer Engine has no recipe that casts as {recipe.name!r} says")
    if not hasattr(known, kind):
        raise ConfigError(f"this version of Transformer Engine has no {kind}, which {recipe.name!r} asks for")
    if recipe.fp8_format == E5M2.name:
        raise ConfigError(f"Transformer Engine does not train in E5M2 alone, as {recipe.name!r} asks")
    try:
        made = getattr(known, kind)(**_options(recipe, known))
        _set_operands(made, recipe, known)
        with torch.no_grad(), autocast(made):  # which asks the device
            pass
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Transformer Engine cannot cast as {recipe.name!r} says: {reason}") from None
    return made


def _options(recipe: Recipe, known: Any) -> dict[str, Any]:
    rule = recipe.scaling
    has_format = isinstance(rule, (CurrentScaling, DelayedScaling, BlockScaling, MXFP8Scaling))
    options: dict[str, Any] = {"fp8_format": getattr(known.Format, recipe.fp8_format.upper())} if has_format else {}
    if isinstance(rule, DelayedScaling):
        names = ("margin", "amax_history_len", "amax_compute_algo")
        options |= {name: getattr(rule, name) for name in names}
    if isinstance(rule, BlockScaling) and rule.dimensions:
        options |= {f"{operand}_block_scaling_dim": rule.dimensions for operand in ("x", "w", "grad")}
    if isinstance(rule, MXFP8Scaling) and rule.square_weights:
        options["enable_2d_quantization"] = True
    if isinstance(rule, NVFP4Scaling) and not rule.square_weights:
        options["disable_2d_quantization"] = True
    return options


def _set_operands(made: Any, recipe: Recipe, known: Any) -> None:
    """Options that Transformer Engine keeps an operand each, and sets from the environment."""
    rule = recipe.scaling
    if isinstance(rule, (CurrentScaling, BlockScaling)):
        for name in _OPERANDS:
            setattr(made, name, known.QParams(power_2_scale=rule.power_of_two, amax_epsilon=rule.epsilon))


def autocast(recipe: Any) -> Any:
    """Transformer Engine's context for `recipe`, None for high precision, within the run's own where there is one."""
    te = sys.modules["transformer_engine.pytorch"]
    manager = state_manager()
    group, graph = manager.get_fp8_group(), manager.fp8_graph_capturing()
    if hasattr(te, "autocast"):  # since 2.9
        return te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group, _graph=graph)
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, fp8_group=group, _graph=graph)

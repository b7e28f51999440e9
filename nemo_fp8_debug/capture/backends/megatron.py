"""Backend for Megatron-core's own parallel linear layers. Another backend handles its Transformer Engine layers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ...numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from ...numerics.recipe import Recipe
from ...numerics.tensor_scaling import CurrentScaling, DelayedScaling
from .base import Args, FrameworkBackend, Kwargs, read_raw_weight


def _owns(module: nn.Module) -> bool:
    layers: Any = sys.modules.get("megatron.core.tensor_parallel.layers")
    return layers is not None and isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear))


def _weight(module: nn.Module, args: Args, kwargs: Kwargs, part: str) -> torch.Tensor | None:
    # An output layer tied to the embedding has no weight of its own, and receives the weight with each call.
    given: Any = args[1] if len(args) > 1 else kwargs.get("weight")
    return read_raw_weight(module) if given is None else given


#: rules of Megatron's recipes without a history
_RULES: dict[str, CurrentScaling | Float8BlockScaling | MXFP8Scaling] = {
    "tensorwise": CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8Scaling(),
}


def read_configured_recipe(module: nn.Module) -> Recipe | None:
    """Return the FP8 recipe of Megatron's TransformerConfig. Current scaling replaces unsupported recipes."""
    config: Any = getattr(module, "config", None)
    fp8 = getattr(config, "fp8", None)
    if not fp8:
        return None
    fp8_format = {"e4m3": "e4m3", "hybrid": "hybrid"}.get(str(fp8), "hybrid")
    name = str(getattr(config, "fp8_recipe", "delayed"))
    if name != "delayed":
        return Recipe(_RULES.get(name, CurrentScaling()), fp8_format)
    delayed = DelayedScaling(config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo)
    return Recipe(delayed, fp8_format)


BACKEND = FrameworkBackend(
    name="Megatron ColumnParallelLinear and RowParallelLinear",
    owns=_owns,
    input=lambda module, args, kwargs, part: args[0] if args else kwargs["input_"],
    weight=_weight,
    output=lambda out: out[0] if isinstance(out, tuple) else out,
    recipe=read_configured_recipe,
)

"""Names for modules of Transformer Engine, by which a quantizer factory tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..capture.scan import scan_modules
from ..errors import ConfigError


def name_modules(model: nn.Module | Sequence[nn.Module]) -> int:
    """Name a model's modules of Transformer Engine as records name them; called once, before the first step.

    Transformer Engine hands its `CustomRecipe` the name of the module that asks for a quantizer, which is empty unless the
    module was built with one. The file `te_quantizers.py` that `recommend` writes goes by these names.

    Args:
        model: the model, or a list of its chunks if a virtual pipeline splits it.

    Returns:
        How many were named; a name that one had before is replaced.

    Raises:
        ConfigError: a module has asked a custom recipe for its quantizers already.

    Example:
        >>> import torch
        >>> from nemo_fp8_debug import name_modules
        >>> name_modules(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        0
    """
    named = 0
    for one in scan_modules([model] if isinstance(model, nn.Module) else model):
        module: Any = one.module
        if not hasattr(module, "get_quantizer_roles"):
            continue
        if type(getattr(module, "fp8_meta", {}).get("scaling_fwd")).__name__ == "CustomRecipeState":
            raise ConfigError(f"{one.name} has run under a custom recipe already; call name_modules before the first step")
        module.name = one.name
        named += 1
    return named

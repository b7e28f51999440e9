"""Apply a plan to a model, for callbacks and plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..capture.gemms import find_gemms
from ..capture.scan import scan_modules
from ..errors import ConfigError
from ..plan.plan import NO_CHANGES, AnyPlan, read_plan_in_force
from .emulate import check_changes_name_gemms
from .transformer_engine import EngineChanges


def name_modules(model: nn.Module | Sequence[nn.Module]) -> int:
    """Give a model's Transformer Engine modules the names that records use. Call this once, before the first step.

    Transformer Engine passes its `CustomRecipe` the name of the module that requests a quantizer. This name is empty
    unless the module was built with a name. The file `te_quantizers.py` that `recommend` writes needs these names.

    Args:
        model: the model, or a list of its chunks if a virtual pipeline splits it.

    Returns:
        The number of named modules. New names replace the earlier names of these modules.

    Raises:
        ConfigError: a module has already requested its quantizers from a custom recipe.

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
            raise ConfigError(
                f"{one.global_name} has run under a custom recipe already; call name_modules before the first step"
            )
        module.name = one.global_name
        named += 1
    return named


def apply_plan(model: nn.Module | Sequence[nn.Module], plan: AnyPlan | None = None) -> EngineChanges:
    """Change how Transformer Engine quantizes a model, from now on. Call this on all ranks.

    Args:
        model: the model, or a list of its chunks if a virtual pipeline splits it.
        plan: a `Plan` or the path of its file. None makes no changes. In a run started by `nemo-fp8-debug rescue`, the
            plan of `rescue` replaces this plan.

    Returns:
        An object that represents the applied changes. Call its method `end_step()` after each step's backward, to update
            the delayed scales of emulated operands. Its method `detach()` restores the model.

    Raises:
        ConfigError: the plan cannot be read, names no GEMM that Transformer Engine runs on any rank, or contains a change
            that Transformer Engine cannot make.

    Example:
        >>> import torch
        >>> from nemo_fp8_debug import apply_plan
        >>> changes = apply_plan(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        >>> changes.detach()
    """
    wanted = read_plan_in_force(plan) or NO_CHANGES
    gemms = [g for g in find_gemms([model] if isinstance(model, nn.Module) else model) if g.backend.takes_plans]
    check_changes_name_gemms(wanted, gemms, "that Transformer Engine runs")
    changes = EngineChanges(gemms, wanted)
    changes.attach()
    return changes

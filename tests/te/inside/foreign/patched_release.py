"""Foreign engine 1: a later release of Transformer Engine, whose current scaling casts otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from foreign_engines.witness import WITNESS
from te_release import (
    MODULES,
    Engine,
    later_release,
    layers,
    nearest,
    rounded_up,
    same_release,
    truncated,
    with_headroom,
)
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer as Quantizer

_init = Quantizer.__init__


def unpatched(patch: pytest.MonkeyPatch) -> Engine:
    """The installed release as it is, to show that what is compared is the same thing."""
    same_release(patch)
    return Engine(layers(), Float8CurrentScaling())


def unpatched_delayed(patch: pytest.MonkeyPatch) -> Engine:
    same_release(patch)
    return Engine(layers(), DelayedScaling(amax_history_len=2))


def new_attribute(patch: pytest.MonkeyPatch) -> Engine:
    """Each quantizer has an attribute that says how it rounds."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _init(self, *args, **kwargs)
        self.rounding = "toward_zero"

    patch.setattr(Quantizer, "__init__", init)
    later_release(patch, lambda quantizer: truncated if quantizer.rounding == "toward_zero" else nearest)
    return Engine(layers(), Float8CurrentScaling())


def new_class_attribute(patch: pytest.MonkeyPatch) -> Engine:
    """The attribute stands in the class, as defaults do, and nobody has set it on an instance."""
    patch.setattr(Quantizer, "rounding", "toward_zero", raising=False)
    later_release(patch, lambda quantizer: truncated if quantizer.rounding == "toward_zero" else nearest)
    return Engine(layers(), Float8CurrentScaling())


def class_attribute_later(patch: pytest.MonkeyPatch) -> Engine:
    """The same under the name of the release that is installed, once the run is under way."""
    same_release(patch, lambda quantizer: truncated if hasattr(quantizer, "rounding") else nearest)
    engine = Engine(layers(), Float8CurrentScaling())

    def set_it(*args: Any) -> None:
        if WITNESS.step == 1:
            patch.setattr(Quantizer, "rounding", "toward_zero", raising=False)

    engine.model.register_forward_pre_hook(set_it)
    return engine


def new_value_of_attribute(patch: pytest.MonkeyPatch) -> Engine:
    """What was a switch has become one of several words: the recipe sets `force_pow_2_scales` to "up"."""
    later_release(patch, lambda quantizer: rounded_up if quantizer.force_pow_2_scales == "up" else nearest)
    recipe: Any = Float8CurrentScaling()
    up = SimpleNamespace(power_2_scale="up", amax_epsilon=0.0)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = up
    return Engine(layers(), recipe)


def new_recipe_field(patch: pytest.MonkeyPatch) -> Engine:
    """The recipe has a field that the cast itself asks for; no quantizer knows of it."""
    patch.setattr(Float8CurrentScaling, "headroom", 2.0, raising=False)

    def rule(quantizer: Any) -> Any:
        recipes = [module.fp8_meta["recipe"] for module in MODULES if "recipe" in module.fp8_meta]
        return with_headroom if any(recipe.headroom == 2.0 for recipe in recipes) else nearest

    later_release(patch, rule)
    return Engine(layers(), Float8CurrentScaling())


def new_arithmetic(patch: pytest.MonkeyPatch) -> Engine:
    """No name is new; the release rounds otherwise, and its notes say so."""
    later_release(patch, lambda quantizer: truncated)
    return Engine(layers(), Float8CurrentScaling())


ENGINES: dict[str, Callable[[pytest.MonkeyPatch], Engine]] = {
    function.__name__: function
    for function in (
        unpatched,
        unpatched_delayed,
        new_attribute,
        new_class_attribute,
        class_attribute_later,
        new_value_of_attribute,
        new_recipe_field,
        new_arithmetic,
    )
}

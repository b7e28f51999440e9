"""Recipes: the format that each operand is cast to, the rule for its scale, and the names of recipes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError
from .block_scaling import BlockScalingRule, Float8BlockScaling, MXFP8Scaling, RowwiseScaling
from .formats import E4M3, E5M2, FORMATS, FloatFormat
from .nvfp4_scaling import NVFP4Scaling, TorchaoNVFP4Scaling
from .tensor_scaling import CurrentScaling, DelayedScaling, Unscaled

Scaling = CurrentScaling | DelayedScaling | Unscaled | BlockScalingRule

_SCALINGS: dict[str, type[Scaling]] = {
    "delayed": DelayedScaling,
    "current": CurrentScaling,
    "rowwise": RowwiseScaling,
    "blockwise": Float8BlockScaling,
    "mxfp8": MXFP8Scaling,
    "nvfp4": NVFP4Scaling,
    "nvfp4_torchao": TorchaoNVFP4Scaling,
    "bf16": Unscaled,
}
_NAME_OF = {scaling: name for name, scaling in _SCALINGS.items()}


@dataclass(frozen=True)
class Recipe:
    """A recipe: the format that each operand is cast to, and how its scale is chosen."""

    scaling: Scaling
    #: "hybrid" casts X and W to E4M3 and dY to E5M2; a format's name casts all three to it; "" is the rule's default
    fp8_format: str = ""

    def __post_init__(self) -> None:
        formats = self.scaling.formats
        if self.fp8_format not in ("", *formats):
            raise ConfigError(f"fp8_format is {self.fp8_format!r}; use {' or '.join(map(repr, formats))}")
        object.__setattr__(self, "fp8_format", self.fp8_format or formats[0])

    def get_format(self, role: str) -> FloatFormat:
        """Return the format that operand `role` is cast to."""
        if self.fp8_format == "hybrid":
            return E5M2 if role == "grad_output" else E4M3
        return FORMATS[self.fp8_format]

    @functools.cached_property
    def name(self) -> str:
        """Short unique name, such as `delayed-hybrid` or `delayed-hybrid(margin=1)`. Default options are left out."""
        changed = [
            f"{f.name}={getattr(self.scaling, f.name)}"
            for f in fields(self.scaling)
            if getattr(self.scaling, f.name) != f.default
        ]
        choice = f"-{self.fp8_format}" if len(self.scaling.formats) > 1 else ""
        return _NAME_OF[type(self.scaling)] + choice + (f"({','.join(changed)})" if changed else "")

    @property
    def uses_block_scaling(self) -> bool:
        """True if each block of a tensor has its own scale. A histogram cannot measure such casts."""
        return isinstance(self.scaling, BlockScalingRule)


#: the recipe of a run that casts no operand
BF16_RECIPE = Recipe(Unscaled())


def refuse_block_scaling(recipe: Recipe, what: str) -> None:
    """Raise an error if the recipe scales blocks, which `what` does not support.

    Raises:
        ConfigError: the recipe scales blocks.
    """
    if recipe.uses_block_scaling:
        raise ConfigError(f"{what} takes recipes with one scale per tensor (delayed, current, bf16), not {recipe.name!r}")


_NAME = re.compile(r"(?P<name>\w+?)(-(?P<fp8_format>\w+))?(\((?P<options>[^()]*)\))?")


def parse_recipe(value: str | Mapping[str, Any] | Recipe) -> Recipe:
    """Return the recipe with a name, or with the options in a mapping.

    Args:
        value: a name such as `"delayed"`, `"current-e4m3"`, `"delayed-hybrid(margin=1,amax_history_len=16)"`, `"mxfp8"`,
            `"blockwise(power_of_two=False)"`, `"rowwise"`, `"nvfp4"` or `"bf16"`, or a mapping
            `{"name": "delayed", "fp8_format": "hybrid", "margin": 0, "amax_history_len": 1, "amax_compute_algo": "max"}`.

    Raises:
        ConfigError: unknown recipe, option or value.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str):
        return _named(value)
    return _of_options(dict(value) if isinstance(value, Mapping) else {"name": value})


class RecipeReference:
    """An object that has the name of a recipe."""

    recipe: str

    @property
    def parsed_recipe(self) -> Recipe:
        """The recipe with this name, parsed only once. This is internal, because recipes are not public.

        Raises:
            ConfigError: no known recipe has this name.
        """
        return parse_recipe(self.recipe)


def find_recipe(name: str | None) -> Recipe | None:
    """Return the recipe that a record names.

    Args:
        name: the recorded name, or None.

    Returns:
        The recipe, or None if there is no name or the name is unknown. A framework may have further recipes.
    """
    try:
        return None if name is None else _named(name)
    except ConfigError:
        return None


@functools.lru_cache(maxsize=256)
def _named(name: str) -> Recipe:
    return _of_options(_options_in(name))


def _of_options(options: dict[str, Any]) -> Recipe:
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in _SCALINGS:
        raise ConfigError(f"unknown recipe {name!r}; known recipes: {', '.join(_SCALINGS)}")
    fp8_format = options.pop("fp8_format", "")
    scaling = _SCALINGS[name]
    known = {f.name for f in fields(scaling)}
    if unknown := set(options) - known:
        raise ConfigError(
            f"recipe {name!r} has no option {', '.join(sorted(map(repr, unknown)))}; "
            f"its options: {', '.join(['fp8_format', *sorted(known)])}"
        )
    for f in fields(scaling):
        given, kind = options.get(f.name, f.default), type(f.default)
        if type(given) is not kind and not (kind is float and type(given) is int):
            raise ConfigError(f"{f.name} of recipe {name!r} is {given!r}; it must be {kind.__name__}")
    return Recipe(scaling(**options), fp8_format)


def _options_in(text: str) -> dict[str, Any]:
    """Return the options in a recipe's name. Values are Python literals, or else strings."""
    found = _NAME.fullmatch(text.replace(" ", ""))
    if found is None:
        return {"name": text}
    options: dict[str, Any] = {key: found[key] for key in ("name", "fp8_format") if found[key]}
    for option in filter(None, (found["options"] or "").split(",")):
        key, _, literal = option.partition("=")
        try:
            options[key] = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            options[key] = literal
    return options

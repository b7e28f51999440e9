"""Functions and data that are common to the files of all frameworks."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....core.layer_names import find_expert_aggregate
from ....numerics.recipe import Recipe
from ..options import STAY, CastOption, resolve_recipe_cast
from ..recommend import TensorFix


@dataclass(frozen=True)
class Snippet:
    """A configuration file for a framework."""

    name: str
    #: purpose of the file, in a few words
    about: str
    text: str
    #: sentences about changes that the framework cannot express exactly
    coarser: tuple[str, ...] = ()


def comment_lines(*paragraphs: str) -> str:
    """Wrap paragraphs as comments of YAML, shell and Python."""
    wrapper = textwrap.TextWrapper(118, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for text in paragraphs for line in wrapper.wrap(text))


def find_common_recipe(findings: Sequence[TensorFix], recipes: Iterable[Recipe]) -> Recipe | None:
    """Return the first recipe under which all operands are within the budget, as far as errors are known, or None."""
    return next((recipe for recipe in recipes if all(_meets(finding, recipe) for finding in findings)), None)


def _meets(finding: TensorFix, recipe: Recipe) -> bool:
    wanted = resolve_recipe_cast(recipe, finding.role)
    others = (option for option in finding.options if option.meets and option.kind != STAY)
    return any(resolve_recipe_cast(option.parsed_recipe, finding.role) == wanted for option in others)


def combine_options(menus: Iterable[Sequence[CastOption]]) -> Iterator[tuple[CastOption, ...]]:
    """Yield all ways to choose one option from each menu, the cheapest first.

    Args:
        menus: menus of options, each in order of cost.
    """
    ways = itertools.product(*(enumerate(menu) for menu in menus))
    for way in sorted(ways, key=lambda way: sum(place for place, _ in way)):
        yield tuple(option for _, option in way)


def name_module_of_gemm(layer: str) -> str:
    """Return the module that runs a GEMM, with `*` for the number of an expert that is a separate module.

    A grouped module runs all experts: `mlp.experts.linear_fc1.17` -> `mlp.experts.linear_fc1`.
    """
    return (find_expert_aggregate(layer) or layer).removesuffix(".*")

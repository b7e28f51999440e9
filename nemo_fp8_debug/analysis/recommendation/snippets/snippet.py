"""What the files of all hosts have in common."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....core.layer_names import name_aggregate
from ....numerics.recipe import Recipe
from ..options import STAY, Option, find_cast
from ..recommend import TensorFix


@dataclass(frozen=True)
class Snippet:
    """A file for a host."""

    name: str
    #: what it is for, in a few words
    about: str
    text: str
    #: what the host cannot express, a sentence each
    coarser: tuple[str, ...] = ()


def comment_lines(*paragraphs: str) -> str:
    """Text as comments of YAML, shell and Python."""
    wrapper = textwrap.TextWrapper(118, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for text in paragraphs for line in wrapper.wrap(text))


def first_for_all(findings: Sequence[TensorFix], recipes: Iterable[Recipe]) -> Recipe | None:
    """The first recipe under which every operand keeps the budget, as far as is known."""
    return next((recipe for recipe in recipes if all(_meets(finding, recipe) for finding in findings)), None)


def _meets(finding: TensorFix, recipe: Recipe) -> bool:
    wanted = find_cast(recipe, finding.role)
    others = (option for option in finding.options if option.meets and option.kind != STAY)
    return any(find_cast(option.parsed, finding.role) == wanted for option in others)


def combine_options(menus: Iterable[Sequence[Option]]) -> Iterator[tuple[Option, ...]]:
    """Yield an option of each menu, all ways to choose them, the cheapest first.

    Args:
        menus: options in order of cost.
    """
    ways = itertools.product(*(enumerate(menu) for menu in menus))
    for way in sorted(ways, key=lambda way: sum(place for place, _ in way)):
        yield tuple(option for _, option in way)


def find_module(layer: str) -> str:
    """The module that a GEMM is multiplied in, `*` for the number of an expert that has one of its own.

    `decoder.layers.3.mlp.experts.linear_fc1.17` -> `decoder.layers.3.mlp.experts.linear_fc1`: a module multiplies the group.
    """
    return (name_aggregate(layer) or layer).removesuffix(".*")

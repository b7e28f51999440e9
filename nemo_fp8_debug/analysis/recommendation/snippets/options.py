"""Options of a whole run: Megatron's TransformerConfig, its command line, and NeMo's MegatronMixedPrecision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import yaml

from ....numerics.recipe import BF16_RECIPE, Recipe, find_recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ...comparison.compare import quantized
from ..options import STAY
from ..recommend import Ends, Finding, Recommendation, block_of
from .megatron import RECIPES
from .snippet import Snippet, commented, first_for_all

_HOW = "Options of the whole run: fields of Megatron's TransformerConfig, and of Megatron-Bridge's MixedPrecisionConfig."
VALUES, NEMO = "transformer_config.yaml", "nemo_precision.py"


def run_wide(found: Recommendation) -> Iterator[Snippet]:
    """A file of plain values, and a snippet for NeMo where there are any."""
    inside = [f for f in found.to_change if not _at_an_end(f, found.ends)]
    solved = [f for f in inside if f.chosen.recipe != BF16_RECIPE.name]
    recipe = first_for_all(solved, _menu(solved, found.ends)) if solved else None
    unsolved = [f for f in inside if recipe is None or f not in solved]
    values, coarser = _options(recipe, found, unsolved)
    flags = "Megatron-LM: " + (" ".join(flags_of(values)) or "none")
    if found.to_change:
        text = commented(_HOW, flags, *coarser) + yaml.safe_dump(values, sort_keys=False)
        yield Snippet(VALUES, "options of the whole run, Megatron", text, tuple(coarser))
    if values:
        yield Snippet(NEMO, "options of the whole run, NeMo", _nemo(values, coarser))


def _nemo(values: dict[str, Any], coarser: list[str]) -> str:
    arguments = "".join(f"    {name}={value!r},\n" for name, value in values.items())
    return (
        commented("For nl.Trainer(plugins=precision).", *coarser)
        + "from nemo.lightning import MegatronMixedPrecision\n\n"
        + f'precision = MegatronMixedPrecision(\n    precision="bf16-mixed",\n{arguments})\n'
    )


def flags_of(values: dict[str, Any]) -> list[str]:
    """The same options as Megatron-LM's command line has them."""
    flags = []
    for name, value in values.items():
        flag = "--fp8-format" if name == "fp8" else "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _at_an_end(finding: Finding, ends: Ends | None) -> bool:
    block = block_of(finding.layer)
    return ends is not None and block is not None and (block < ends.start or block >= ends.blocks - ends.end)


def _in_use(found: Recommendation) -> Recipe | None:
    """What most operands are cast with; None where it has no name here."""
    metrics = quantized(found.run.metrics)
    counts = metrics.gathered(["recipe"], lambda rows: rows.group_by("recipe", maintain_order=True).agg(pl.sum("count")))
    names = counts.sort("count", descending=True, maintain_order=True)
    recipe = find_recipe(names["recipe"][0])
    return recipe if recipe and _can_be_said(recipe) else None


def _menu(findings: list[Finding], ends: Ends | None) -> list[Recipe]:
    """Recipes of all the findings' options that Megatron has options for; formats that differ by role in either way."""
    recipes = [option.parsed for finding in findings for option in finding.options if option.kind != STAY]
    both = [Recipe(r.scaling, fmt) for r in recipes for fmt in ("hybrid", "e4m3") if fmt in r.scaling.formats]
    refused = DelayedScaling if ends else ()
    return [recipe for recipe in dict.fromkeys(both) if _can_be_said(recipe) and not isinstance(recipe.scaling, refused)]


def _can_be_said(recipe: Recipe) -> bool:
    plain = recipe.scaling == type(recipe.scaling)() and type(recipe.scaling) in RECIPES
    return recipe.fp8_format in ("hybrid", "e4m3") and (plain or isinstance(recipe.scaling, DelayedScaling))


def _options(recipe: Recipe | None, found: Recommendation, unsolved: list[Finding]) -> tuple[dict[str, Any], list[str]]:
    """Fields of TransformerConfig; what they cannot express, or say of more than was asked for."""
    coarser = [
        f"{f.name}: no option of the whole run does it; recipes of modules do, see the other files." for f in unsolved
    ]
    if recipe:
        coarser.append(f"{recipe.name} is for all layers of the run, not only for those that need it.")
    if found.ends is None:
        return _recipe_options(recipe), coarser
    recipe = recipe or _in_use(found)
    if recipe and isinstance(recipe.scaling, DelayedScaling):
        recipe = Recipe(CurrentScaling(), recipe.fp8_format)
        coarser.append("Megatron refuses blocks in BF16 under delayed scaling: the others get tensorwise scaling.")
    coarser.append(f"The first {found.ends.start} and the last {found.ends.end} blocks are in BF16 as a whole.")
    return _recipe_options(recipe) | {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": found.ends.start,
        "num_layers_at_end_in_bf16": found.ends.end,
    }, coarser


def _recipe_options(recipe: Recipe | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    scaling = recipe.scaling
    if isinstance(scaling, DelayedScaling):
        return {
            "fp8": recipe.fp8_format,
            "fp8_recipe": "delayed",
            "fp8_margin": scaling.margin,
            "fp8_amax_history_len": scaling.amax_history_len,
            "fp8_amax_compute_algo": scaling.amax_compute_algo,
        }
    return {"fp8": recipe.fp8_format, "fp8_recipe": RECIPES[type(scaling)]}

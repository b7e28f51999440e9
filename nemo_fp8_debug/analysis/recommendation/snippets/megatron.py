"""Write Megatron's files: recipes of single modules, and options of the whole run.

Recipes of modules are for `--te-precision-config-file` or `TransformerConfig.quant_recipe`. Options are for
`TransformerConfig`, Megatron-LM's command line, and NeMo's `MegatronMixedPrecision`.

Source: `megatron/core/quantization/quant_config.py`, and `TEQuantizationRecipe` in `megatron/core/extensions/
transformer_engine.py`, of megatron-core 0.16.0 (the first release with these) and 0.17.1.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl
import yaml

from ....numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from ....numerics.recipe import BF16_RECIPE, Recipe, find_recipe
from ....numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ...comparison.compare import select_quantized_operands
from ..options import STAY, resolve_recipe_cast
from ..recommend import BF16EndBlocks, Recommendation, TensorFix, find_decoder_block_index
from .snippet import Snippet, comment_lines, find_common_recipe, name_module_of_gemm

NAME, OPTIONS = "megatron_modules.yaml", "transformer_config.yaml"
#: Megatron's names of recipes for single modules, in order of cost, without delayed scaling
RECIPES: dict[type[Any], str] = {CurrentScaling: "tensorwise", Float8BlockScaling: "blockwise", MXFP8Scaling: "mxfp8"}
_MENU = [Recipe(scaling(), fmt) for scaling in RECIPES for fmt in ("hybrid", "e4m3")] + [BF16_RECIPE]
_HOW = (
    "Recipes of single modules. Megatron-LM: --te-precision-config-file THIS_FILE; Megatron-Bridge and others: quant_recipe "
    "of TransformerConfig = megatron.core.quantization.utils.load_quantization_recipe(THIS_FILE). This needs megatron-core "
    "0.16 or later and Transformer Engine, and weights that are not stored in FP8 (--fp8-param-gather)."
)
_HOW_OPTIONS = (
    "Options of the whole run: fields of Megatron's TransformerConfig, of Megatron-Bridge's MixedPrecisionConfig, and of "
    "NeMo's MegatronMixedPrecision."
)


def make_module_recipes_snippet(found: Recommendation) -> Snippet | None:
    """Return the file with recipes of modules, or None if nothing changes."""
    by_pattern: dict[str, list[TensorFix]] = {}
    for finding in found.fixes_to_apply:
        by_pattern.setdefault(name_module_on_its_rank(name_module_of_gemm(finding.layer), found), []).append(finding)
    if not by_pattern:
        return None
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    coarser = []
    for pattern, findings in by_pattern.items():
        recipe = find_common_recipe(findings, _MENU) or BF16_RECIPE
        name = "bf16" if recipe == BF16_RECIPE else f"{RECIPES[type(recipe.scaling)]}_{recipe.fp8_format}"
        configs[name] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": _recipe(recipe)}
        matchers[pattern] = {"type": "glob", "enabled": True, "pattern": pattern, "config": name}
        coarser += [_coarser(finding, recipe, name) for finding in findings]
    if count_pipeline_stages(found) > 1:
        coarser.append(
            f"Each of {count_pipeline_stages(found)} parts of the pipeline numbers its blocks from 0, and Megatron matches "
            "these names. So this changes the same blocks in every part. We assume that all parts have equally many blocks."
        )
    content = yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False)
    return Snippet(NAME, "recipes of modules, Megatron", comment_lines(_HOW, *coarser) + content, tuple(coarser))


def _recipe(recipe: Recipe) -> dict[str, str]:
    if recipe == BF16_RECIPE:
        return {}  # an operand without a recipe stays in high precision
    return {"fp8_quantization_recipe": RECIPES[type(recipe.scaling)], "fp8_format": recipe.fp8_format}


def _coarser(finding: TensorFix, recipe: Recipe, name: str) -> str:
    chosen = finding.chosen_option
    if chosen.recipe == BF16_RECIPE.name:
        tensor = finding.tensor_name
        return f"{tensor}: BF16 applies to all three GEMMs of the module, not only for the two that read this operand."
    if resolve_recipe_cast(chosen.parsed_recipe, finding.role) == resolve_recipe_cast(recipe, finding.role):
        return f"{finding.tensor_name}: {name} applies to all operands of the module."
    return f"{finding.tensor_name}: a module cannot have {chosen.recipe}; it has {name} instead, for all of its operands."


def count_pipeline_stages(found: Recommendation) -> int:
    """Count the parts of a pipeline. Each part numbers its blocks from 0."""
    host = found.run.fingerprint.get("backend_options", {})
    return (host.get("pipeline_model_parallel_size") or 1) * (host.get("virtual_pipeline_model_parallel_size") or 1)


def name_module_on_its_rank(module: str, found: Recommendation) -> str:
    """Return a module's name on its rank. The names differ because each part of a pipeline numbers its blocks from 0."""
    number = re.match(r"decoder\.layers\.(\d+)\.", module)
    if count_pipeline_stages(found) == 1 or not number:
        return module
    blocks = found.run.fingerprint["backend_options"].get("num_layers") or 0
    return f"decoder.layers.{int(number[1]) % max(1, blocks // count_pipeline_stages(found))}.{module[number.end() :]}"


# --- options of the whole run -------------------------------------------------------------------------------------------


def make_global_options_snippet(found: Recommendation) -> Snippet | None:
    """Return the file with options of the whole run, or None if nothing changes."""
    if not found.fixes_to_apply:
        return None
    inside = [f for f in found.fixes_to_apply if not _at_an_end(f, found.ends)]
    solved = [f for f in inside if f.chosen_option.recipe != BF16_RECIPE.name]
    recipe = find_common_recipe(solved, _menu(solved, found.ends)) if solved else None
    unsolved = [f for f in inside if recipe is None or f not in solved]
    values, coarser = _options(recipe, found, unsolved)
    flags = "Megatron-LM: " + (" ".join(flags_of(values)) or "none")
    text = comment_lines(_HOW_OPTIONS, flags, *coarser) + yaml.safe_dump(values, sort_keys=False)
    return Snippet(OPTIONS, "options of the whole run, Megatron and NeMo", text, tuple(coarser))


def flags_of(values: dict[str, Any]) -> list[str]:
    """Return the options as flags of Megatron-LM's command line."""
    flags = []
    for name, value in values.items():
        flag = "--fp8-format" if name == "fp8" else "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _at_an_end(finding: TensorFix, ends: BF16EndBlocks | None) -> bool:
    block = find_decoder_block_index(finding.layer)
    return ends is not None and block is not None and (block < ends.start or block >= ends.blocks - ends.end)


def _in_use(found: Recommendation) -> Recipe | None:
    """Return the recipe of most operands, or None if Megatron has no options for this recipe."""
    metrics = select_quantized_operands(found.run.metrics)
    counts = metrics.reduce_rows(["recipe"], lambda rows: rows.group_by("recipe", maintain_order=True).agg(pl.sum("count")))
    names = counts.sort("count", descending=True, maintain_order=True)
    recipe = find_recipe(names["recipe"][0])
    return recipe if recipe and _can_be_said(recipe) else None


def _menu(findings: list[TensorFix], ends: BF16EndBlocks | None) -> list[Recipe]:
    """Return the recipes from the options of all findings that Megatron supports, each with the formats `hybrid` and
    `e4m3`.
    """
    recipes = [option.parsed_recipe for finding in findings for option in finding.options if option.kind != STAY]
    both = [Recipe(r.scaling, fmt) for r in recipes for fmt in ("hybrid", "e4m3") if fmt in r.scaling.formats]
    refused = DelayedScaling if ends else ()
    return [recipe for recipe in dict.fromkeys(both) if _can_be_said(recipe) and not isinstance(recipe.scaling, refused)]


def _can_be_said(recipe: Recipe) -> bool:
    plain = recipe.scaling == type(recipe.scaling)() and type(recipe.scaling) in RECIPES
    return recipe.fp8_format in ("hybrid", "e4m3") and (plain or isinstance(recipe.scaling, DelayedScaling))


def _options(recipe: Recipe | None, found: Recommendation, unsolved: list[TensorFix]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of TransformerConfig, and sentences about changes that these fields cannot express or that affect more
    than needed.
    """
    coarser = [
        f"{f.tensor_name}: no option of the whole run can do this. Recipes of modules can; see the other files."
        for f in unsolved
    ]
    if recipe:
        coarser.append(f"{recipe.name} applies to all layers of the run, not only to layers that need it.")
    if found.ends is None:
        return _recipe_options(recipe), coarser
    recipe = recipe or _in_use(found)
    if recipe and isinstance(recipe.scaling, DelayedScaling):
        recipe = Recipe(CurrentScaling(), recipe.fp8_format)
        coarser.append("Megatron allows no BF16 blocks with delayed scaling, so the other blocks get tensorwise scaling.")
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

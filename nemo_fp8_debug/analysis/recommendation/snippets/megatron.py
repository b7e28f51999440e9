"""Megatron's per-module recipes: a file for `--te-precision-config-file`, or for `TransformerConfig.quant_recipe`.

Source: `megatron/core/quantization/quant_config.py`, and `TEQuantizationRecipe` in `megatron/core/extensions/
transformer_engine.py`, of megatron-core 0.16.0, the first that has it, and 0.17.1.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ....numerics.block_scaling import BlockScaling, MXFP8Scaling
from ....numerics.recipe import BF16_RECIPE, Recipe
from ....numerics.tensor_scaling import CurrentScaling
from ..options import cast_of
from ..recommend import Finding, Recommendation
from .snippet import Snippet, commented, first_for_all, module_of

NAME = "megatron_modules.yaml"
#: what Megatron calls the recipes that it can give a module, in order of cost; delayed scaling is not among them
RECIPES: dict[type[Any], str] = {CurrentScaling: "tensorwise", BlockScaling: "blockwise", MXFP8Scaling: "mxfp8"}
_MENU = [Recipe(scaling(), fmt) for scaling in RECIPES for fmt in ("hybrid", "e4m3")] + [BF16_RECIPE]
_HOW = (
    "Recipes of single modules. Megatron-LM: --te-precision-config-file THIS_FILE; Megatron-Bridge and others: quant_recipe "
    "of TransformerConfig = megatron.core.quantization.utils.load_quantization_recipe(THIS_FILE). It takes megatron-core "
    "0.16 or later and Transformer Engine, and weights that are not kept in FP8 (--fp8-param-gather)."
)


def per_module(found: Recommendation) -> Snippet | None:
    """The file; None where nothing changes."""
    by_pattern: dict[str, list[Finding]] = {}
    for finding in found.to_change:
        by_pattern.setdefault(local_name(module_of(finding.layer), found), []).append(finding)
    if not by_pattern:
        return None
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    coarser = []
    for pattern, findings in by_pattern.items():
        recipe = first_for_all(findings, _MENU) or BF16_RECIPE
        name = "bf16" if recipe == BF16_RECIPE else f"{RECIPES[type(recipe.scaling)]}_{recipe.fp8_format}"
        configs[name] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": _recipe(recipe)}
        matchers[pattern] = {"type": "glob", "enabled": True, "pattern": pattern, "config": name}
        coarser += [_coarser(finding, recipe, name) for finding in findings]
    if parts_of(found) > 1:
        coarser.append(
            f"Each of {parts_of(found)} parts of the pipeline numbers its blocks from 0, and Megatron matches those names: "
            "the same blocks are changed in every part. Blocks are taken to be spread evenly."
        )
    content = yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False)
    return Snippet(NAME, "recipes of modules, Megatron", commented(_HOW, *coarser) + content, tuple(coarser))


def _recipe(recipe: Recipe) -> dict[str, str]:
    if recipe == BF16_RECIPE:
        return {}  # none is high precision
    return {"fp8_quantization_recipe": RECIPES[type(recipe.scaling)], "fp8_format": recipe.fp8_format}


def _coarser(finding: Finding, recipe: Recipe, name: str) -> str:
    chosen = finding.chosen
    if chosen.recipe == BF16_RECIPE.name:
        return f"{finding.name}: BF16 is for all three GEMMs of the module, not only for the two that read this operand."
    if cast_of(chosen.parsed, finding.role) == cast_of(recipe, finding.role):
        return f"{finding.name}: {name} is for all operands of the module."
    return f"{finding.name}: a module cannot have {chosen.recipe}; it has {name} instead, for all of its operands."


def parts_of(found: Recommendation) -> int:
    """How many times the blocks are numbered from 0: the parts of a pipeline."""
    host = found.run.fingerprint.get("backend_options", {})
    return (host.get("pipeline_model_parallel_size") or 1) * (host.get("virtual_pipeline_model_parallel_size") or 1)


def local_name(module: str, found: Recommendation) -> str:
    """A module by its name on a rank, whose blocks are numbered from 0 in each part of a pipeline."""
    number = re.match(r"decoder\.layers\.(\d+)\.", module)
    if parts_of(found) == 1 or not number:
        return module
    blocks = found.run.fingerprint["backend_options"].get("num_layers") or 0
    return f"decoder.layers.{int(number[1]) % max(1, blocks // parts_of(found))}.{module[number.end() :]}"

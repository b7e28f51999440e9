"""What is combined: options of recipes, kinds of layers, and how a step goes. The first value of each is the usual one.

`python -m te_table.factors` writes rows/RECIPE.csv: combinations in which each pair of values that Transformer Engine takes
is found. That needs allpairspy, which the tests do not: the rows are committed.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pairs import Factors, Row, covering_rows

ROWS = Path(__file__).with_name("rows")

MEGATRON = (
    *("TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"),
    *("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
)
NORMS = ("LayerNormLinear", "LayerNormLinear RMSNorm", "LayerNormMLP", "TELayerNormColumnParallelLinear")
STEP: Factors = {
    "layer": ("Linear", "LayerNormLinear", "LayerNormLinear RMSNorm", "LayerNormMLP", "GroupedLinear", *MEGATRON),
    "dtype": ("bfloat16", "float32", "float16"),
    "micro_batches": ("1", "3"),
    "order": ("one by one", "all forward first"),
    "recompute": ("none", "te reentrant", "te", "torch reentrant", "torch"),
    # weights are cast anew in each micro-batch, in the first of each step, or in the first of the run only
    "cached_weights": ("no", "from first micro-batch", "from first step"),
    "input_needs_grad": ("yes", "no"),
    "weights_frozen": ("no", "yes"),
    "weights_stored": ("no", "yes"),
    "bias": ("no", "yes"),
    "save_original_input": ("no", "yes"),
}
OVERRIDE = {"backward_override": ("None", "high_precision", "dequantized")}
FORMATS = {"fp8_format": ("HYBRID", "E4M3")}
ATTENTION = {"fp8_dpa": ("False", "True"), "fp8_mha": ("False", "True")}
#: set on the recipe as environment variables, or users, do
QPARAMS = {"qparams": ("as they are", "powers of two", "amax_epsilon")}
SCOPES = ("none", "weights", "activations", "all")
FACTORIES = (
    *("current_scaling", "delayed_scaling", "float8_block_scaling", "high_precision", "mxfp8", "nvfp4"),
    *("high_precision_fwd_mxfp8_bwd", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight", "mxfp8_fwd_high_precision_bwd"),
    *("nvfp4_row_scaled_fwd_mxfp8_bwd", "nvfp4_row_scaled_fwd_high_precision_bwd", "nvfp4_linear_fp8_dpa"),
    "hybrid",
)
#: that give weights a quantizer for one format
NATIVE = ("current_scaling", "delayed_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "nvfp4_linear_fp8_dpa")
RECIPES: Mapping[str, Factors] = {
    "DelayedScaling": {
        **FORMATS,
        "margin": ("0", "1"),
        "amax_history_len": ("1024", "1", "2"),
        "amax_compute_algo": ("max", "most_recent", "callable"),
        "scaling_factor_compute_algo": ("None", "callable"),
        "reduce_amax": ("True", "False"),
        **ATTENTION,
    },
    "Float8CurrentScaling": {**FORMATS, "use_power_2_scales": ("False", "True"), **QPARAMS, **ATTENTION, **OVERRIDE},
    "MXFP8BlockScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "margin": ("0", "1"),
        "enable_2d_quantization": ("False", "True"),
        **ATTENTION,
        **OVERRIDE,
    },
    "Float8BlockScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "use_f32_scales": ("False", "True"),
        **QPARAMS,
        "x_block_scaling_dim": ("1", "2"),
        "w_block_scaling_dim": ("2", "1"),
        "grad_block_scaling_dim": ("1", "2"),
        **OVERRIDE,
    },
    "NVFP4BlockScaling": {
        "disable_rht": ("False", "True"),
        "disable_stochastic_rounding": ("False", "True"),
        "disable_2d_quantization": ("False", "True"),
        "row_scaled_activation": ("False", "True"),
        "nvfp4_4over6": SCOPES,
        "nvfp4_4over6_e4m3_use_256": ("all", "none", "weights", "activations"),
        "nvfp4_4over6_err_mode": ("MAE", "MSE"),
        **OVERRIDE,
    },
    "CustomRecipe": {"qfactory": FACTORIES, "fp8_dpa": ("False", "True"), **OVERRIDE},
}


def factors_of(recipe: str) -> dict[str, Sequence[str]]:
    """All that is combined with a recipe."""
    return {**RECIPES[recipe], **STEP}


def rows_of(recipe: str) -> list[Row]:
    """The committed rows."""
    with (ROWS / f"{recipe}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checksum_of_rows() -> str:
    """What results belong to."""
    found = hashlib.sha256()
    for recipe in RECIPES:
        found.update((ROWS / f"{recipe}.csv").read_bytes())
    return found.hexdigest()[:16]


def is_allowed(recipe: str, row: Row) -> bool:
    """Whether Transformer Engine takes a combination; keys that are missing are not chosen yet."""
    return not any(all(row.get(key) in values for key, values in refused.items()) for refused in _refused(recipe))


def _refused(recipe: str) -> Sequence[Mapping[str, Sequence[str]]]:
    overridden = ("high_precision", "dequantized")
    saves = [layer for layer in STEP["layer"] if layer not in ("Linear", "GroupedLinear")]
    rules: list[Mapping[str, Sequence[str]]] = [
        {"layer": ("LayerNormMLP",), "backward_override": overridden},
        {"layer": saves, "save_original_input": ("yes",)},
        # nothing to differentiate, or nothing of the layer
        {"input_needs_grad": ("no",), "weights_frozen": ("yes",)},
        {"input_needs_grad": ("no",), "recompute": ("te reentrant", "torch reentrant")},
        {"micro_batches": ("1",), "order": ("all forward first",)},
        # a weight that has changed since it was cached is a fault of the loop
        {"cached_weights": ("from first step",), "weights_frozen": ("no",)},
        # which follows
        {"cached_weights": ("from first step",), "input_needs_grad": ("no",)},
        {"cached_weights": ("from first step",), "recompute": ("te",)},
        # Transformer Engine's recompute saves other tensors in its second pass than in the first, and fails
        {"recompute": ("te",), "input_needs_grad": ("no",)},
        {"recompute": ("te",), "weights_frozen": ("yes",)},
        {"recompute": ("te",), "backward_override": overridden},
    ]
    return rules + _REFUSED_OF.get(recipe, [])


_NOT_GROUPED = [layer for layer in STEP["layer"] if "Grouped" not in layer]
_ALONE = ("weights", "activations", "all")
_REFUSED_OF: Mapping[str, list[Mapping[str, Sequence[str]]]] = {
    "DelayedScaling": [{"save_original_input": ("yes",)}, {"fp8_dpa": ("False",), "fp8_mha": ("True",)}],
    "Float8CurrentScaling": [{"fp8_dpa": ("False",), "fp8_mha": ("True",)}],
    "MXFP8BlockScaling": [{"fp8_dpa": ("False",), "fp8_mha": ("True",)}],
    "Float8BlockScaling": [
        {"x_block_scaling_dim": ("2",), "w_block_scaling_dim": ("2",)},
        {"x_block_scaling_dim": ("2",), "grad_block_scaling_dim": ("2",)},
        {"w_block_scaling_dim": ("2",), "grad_block_scaling_dim": ("2",)},
        # a weight that is cached without gradients has no column-wise copy, and none can be made of a row-wise one
        {
            "w_block_scaling_dim": ("1",),
            "layer": ("LayerNormMLP",),
            "recompute": ("torch reentrant", "te reentrant"),
            "cached_weights": ("from first micro-batch", "from first step"),
        },
    ],
    "NVFP4BlockScaling": [
        {"dtype": ("float32", "float16")},
        {"disable_rht": ("False",), "nvfp4_4over6": _ALONE},
        {"row_scaled_activation": ("True",), "backward_override": ("None",)},
        {"nvfp4_4over6": ("none",), "nvfp4_4over6_e4m3_use_256": ("none", "weights", "activations")},
        {"nvfp4_4over6": ("none",), "nvfp4_4over6_err_mode": ("MSE",)},
        {"disable_rht": ("False",), "nvfp4_4over6_e4m3_use_256": ("none", "weights", "activations")},
        {"disable_rht": ("False",), "nvfp4_4over6_err_mode": ("MSE",)},
        {"row_scaled_activation": ("True",), "layer": ("LayerNormMLP",)},
        {"row_scaled_activation": ("True",), "recompute": ("te",)},
    ],
    "CustomRecipe": [
        # weights are stored under a recipe of their quantizer's own; those of a HybridQuantizer under this one
        {"weights_stored": ("yes",), "qfactory": NATIVE},
        {"weights_stored": ("yes",), "qfactory": ("nvfp4_row_scaled_fwd_mxfp8_bwd",), "layer": _NOT_GROUPED},
    ],
}


def main() -> None:
    ROWS.mkdir(exist_ok=True)
    for recipe in RECIPES:
        factors = factors_of(recipe)
        # Weights that are stored hide how they are cast: all other pairs are found in a row without.
        rows = covering_rows(factors, partial(is_allowed, recipe), {**factors, "weights_stored": ["no"]})
        with (ROWS / f"{recipe}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(factors), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{recipe}: {len(rows)} rows")


if __name__ == "__main__":
    main()

"""The column-wise copy that a quantizer makes of an operand, for the product of the backward that sums over its rows.

Of one scale, and of square blocks, both copies hold the same values. Otherwise the column-wise one has blocks of its own,
and may be cast by another quantizer, or transformed first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....numerics.block_scaling import BlockRule
from ....numerics.nvfp4_scaling import SIGN_MASK, NVFP4Scaling
from ....numerics.recipe import parse_recipe
from ..base import ScaleInUse, UnknownCast
from .quantizers import cast_by

#: by role: the product that multiplies its column-wise copy
PRODUCT = {"input": "wgrad", "weight": "dgrad", "grad_output": "wgrad"}
#: products that multiply the row-wise copy
_OTHERS = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}


def cast_with_copy(quantizer: Any, te_recipe: Any, role: str) -> ScaleInUse:
    """How `quantizer` casts operand `role`, with its column-wise copy where that holds other values and is known.

    Raises:
        UnknownCast: what casts the row-wise copy is not known here.
    """
    use = cast_by(quantizer, te_recipe, role)
    if quantizer is None:
        return use
    copy, same = _copy(quantizer, use, te_recipe, role)
    if not _is_sampled(use):
        use = replace(use, products={**use.products, _OTHERS[role]: None})
    if same and _is_sampled(use):
        return use
    return replace(use, columnwise=copy, products={**use.products, PRODUCT[role]: copy if _is_sampled(copy) else None})


def without_copy(use: ScaleInUse, role: str) -> ScaleInUse:
    """Of a call whose backward does not multiply the column-wise copy."""
    return replace(use, columnwise=None, products={**use.products, PRODUCT[role]: None})


def _is_sampled(use: ScaleInUse | None) -> bool:
    """Whether the error of outputs can be had of rows of an operand that is cast so."""
    rule = use and use.scale
    return use is not None and not (isinstance(rule, NVFP4Scaling) and (rule.stochastic or rule.hadamard))


def _copy(quantizer: Any, use: ScaleInUse, te_recipe: Any, role: str) -> tuple[ScaleInUse | None, bool]:
    """The column-wise copy, None if it is not quantized or not known; and whether it holds what the row-wise one does."""
    if type(quantizer).__name__ == "HybridQuantizer":
        if quantizer.columnwise_source != "original":
            return None, False
        try:
            other = cast_by(quantizer.columnwise_quantizer, te_recipe, role)
        except UnknownCast:
            return None, False
        copy, same = _copy(quantizer.columnwise_quantizer, other, te_recipe, role)
        if same:
            return (None, True) if other == use else (other if _is_quantized(other) else None, False)
        return copy, False
    if not _is_quantized(use) or not isinstance(use.scale, BlockRule):
        return None, True
    rule = use.scale
    if getattr(quantizer, "with_rht", False):
        signs = {0: "plain", SIGN_MASK: "signs"}.get(quantizer.rht_matrix_random_sign_mask_t)
        if signs is None or not quantizer.with_post_rht_amax or not isinstance(rule, NVFP4Scaling) or _is_square(rule, role):
            return None, False
        rule = replace(rule, hadamard=signs)
    elif _is_square(rule, role):
        return None, True
    if isinstance(rule, NVFP4Scaling) and rule.row_scaled:
        rule = replace(rule, row_scaled=False)  # the kernel gives the rows of X scales of their own, and not its columns
    recipe = replace(parse_recipe(use.recipe), scaling=rule)
    return replace(use, scale=rule, recipe=recipe.name), False


def _is_square(rule: BlockRule, role: str) -> bool:
    high, wide = rule.block(role)
    return high == wide and not (isinstance(rule, NVFP4Scaling) and rule.stochastic)


def _is_quantized(use: ScaleInUse) -> bool:
    return use.source in ("engine", "expected")

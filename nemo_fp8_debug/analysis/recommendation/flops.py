"""What the GEMMs of a run cost, and how much of that is FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import polars as pl

from ...core.keys import ROLES, Key
from ...core.layer_names import is_aggregate
from ..runs.metrics import Metrics

#: the GEMMs of a linear layer: Y = X W, dX = dY W, dW = dY X, and the two operands that each multiplies
OPERANDS: Mapping[str, tuple[str, str]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
#: the GEMMs that read an operand
READERS: Mapping[str, tuple[str, ...]] = {
    role: tuple(gemm for gemm, operands in OPERANDS.items() if role in operands) for role in ROLES
}


def flops_of(metrics: Metrics) -> dict[str, float]:
    """FLOPs of a forward GEMM of each layer, a mean over the sampled steps; those of the two backward ones are the same.

    With T tokens, K inputs and N outputs, X has TK values, W KN and dY TN, so that 2TKN is twice the root of their product.
    Copies on several ranks and micro-batches are counted as in the record, where X and dY add up and W does not.

    Returns:
        Layers of which all three operands were sampled, without aggregates, whose experts are there one by one.
    """
    single = metrics.among(metrics.tensors.filter(~pl.col("layer").map_elements(is_aggregate, pl.Boolean)))
    sums: dict[str, tuple[float, int]] = {}
    for rows in single.scan(["n", "nan", "inf"]):
        for layer, total, steps in _of_steps(single.named(rows)).iter_rows():
            before = sums.get(layer, (0.0, 0))
            sums[layer] = before[0] + total, before[1] + steps
    means = {layer: 2 * total / steps for layer, (total, steps) in sums.items()}
    return {layer: flops for layer, flops in means.items() if math.isfinite(flops)}


def _of_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """layer, the sum over these steps of the root of the product of its operands' sizes, and how many steps they are."""
    size = pl.sum_horizontal(pl.col("n", "nan", "inf").fill_null(0))
    of_steps = rows.group_by("layer", "step", maintain_order=True).agg(
        size.cast(pl.Float64).product().sqrt().alias("size"), pl.col("role").n_unique().alias("roles")
    )
    whole = of_steps.filter(roles=len(ROLES))
    return whole.group_by("layer", maintain_order=True).agg(pl.col("size").sum(), pl.len().alias("steps"))


def coverage(flops: Mapping[str, float], in_fp8: Callable[[Key], bool]) -> float | None:
    """The share of all GEMMs' FLOPs that are multiplied in FP8: those of GEMMs of which both operands are cast.

    Args:
        flops: as of `flops_of`.
        in_fp8: whether an operand, (layer, role), is cast to FP8.

    Returns:
        0 to 1; None where no layer's FLOPs are known.
    """
    gemms = [(f, all(in_fp8((layer, role)) for role in pair)) for layer, f in flops.items() for pair in OPERANDS.values()]
    total = math.fsum(f for f, _ in gemms)
    return math.fsum(f for f, fp8 in gemms if fp8) / total if total else None

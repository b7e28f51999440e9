"""TensorBoard tags of products, and their lines in the summary of a step."""

from __future__ import annotations

import math

from ...core.keys import RESULTS
from ...core.sample import Sample
from ...record.scalars import ScalarTags, StepSummary
from .table import OUTPUTS, VERIFICATION

#: names of the scalars in the summary
LABELS = {
    "verification/error_over_bound/worst": "error over bound, worst product",
    "verification/wrong_products": "wrong products",
}


def add_scalars(sample: Sample, tags: ScalarTags) -> None:
    """Add the error of each product, and its ratio to the bound."""
    tags.add_product_metric(sample.get_table(OUTPUTS.name), "relative_error", "output_error")
    tags.add_product_metric(sample.get_table(VERIFICATION.name), "error_over_bound", "error_over_bound")


def add_summary(sample: Sample, summary: StepSummary) -> None:
    """Add the product with the largest error over bound, and the number of wrong products."""
    columns = sample.get_table(VERIFICATION.name)
    ratios = [(value, i) for i, value in enumerate(columns.get("error_over_bound", ())) if value is not None]
    if not ratios:
        return
    worst, at = max(ratios, key=lambda ratio: math.inf if math.isnan(ratio[0]) else ratio[0])
    if math.isfinite(worst):
        summary.scalars["verification/error_over_bound/worst"] = worst
    summary.scalars["verification/wrong_products"] = sum(outcome == "beyond" for outcome in columns["outcome"])
    summary.texts["worst_tensor/verification"] = f"{RESULTS[columns['product'][at]]} of {columns['layer'][at]}"

"""TensorBoard tags of weight gradients, optimizer states and steps of weights."""

from __future__ import annotations

from ...core.layer_names import is_expert_aggregate
from ...core.sample import Sample
from ...record.scalars import SPREAD, ScalarTags
from .table import TABLES


def add_scalars(sample: Sample, tags: ScalarTags) -> None:
    """Add shares of the gradient norm, metrics of states, and the size of steps of weights."""
    columns = sample.get_table(TABLES[0].name)
    shares = zip(*(columns.get(name, ()) for name in ("layer", "role", "share_pct")), strict=False)
    of_gradients = {layer: share for layer, role, share in shares if role == "weight_gradient" and share is not None}
    if of_gradients:
        tags.add_layer_metric("gradient_share_pct", "weight_gradient", of_gradients)
    tags.add_uncast_tags("fp8_states", columns)
    steps = zip(columns.get("layer", ()), columns.get("update_to_weight", ()), strict=False)
    if ratios := [ratio for layer, ratio in steps if ratio is not None and not is_expert_aggregate(layer)]:
        tags.add_combined_tags({"fp8_states/update_to_weight": ratios}, SPREAD)

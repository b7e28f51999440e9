"""Metrics of what a step adds to a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...capture.operand_stats import OperandStats
from ...numerics.adam import UPDATE_SUMS
from .table import UPDATE_METRICS


def update_columns(stats: Sequence[OperandStats]) -> dict[str, dict[str, float | None]]:
    """Return `UPDATE_METRICS` of the weights whose steps were compared with exact ones, by layer."""
    known = [(s.key[0], s.further) for s in stats if s.key[1] == "update" and s.further is not None and s.further[0] > 0]
    return {layer: of_update(sums) for layer, sums in known}


def of_update(sums: torch.Tensor) -> dict[str, float | None]:
    """The errors of a step, as parts of the norm of the exact one.

    Args:
        sums: float64, as `numerics.adam.UPDATE_SUMS`.

    Example:
        >>> found = of_update(torch.tensor([9.0, 4.0, 1.0, 1.0, 1.0, 0.0, 100.0, 1.0, 1.0], dtype=torch.float64))
        >>> found["update_error"], found["error_of_first_moment"]
        (0.2, 0.1)
    """
    of = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
    parts = [of[f"{name}_error2"] for name in ("weight_gradient", "first_moment", "second_moment", "weight")]
    errors: list[float | None] = [(x / of["update2"]) ** 0.5 if of["update2"] else None for x in (of["error2"], *parts)]
    if of["parts_with_gradient"] < of["parts"]:
        errors[1] = None
    return dict(zip(UPDATE_METRICS, errors, strict=True))

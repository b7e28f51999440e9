"""Metrics of what GEMMs put out, from sums over parts of their outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...capture.operand_stats import Cast
from ...core.keys import MIXED, Key
from ...core.layer_names import aggregate_of
from ...numerics.gemm_error import PRODUCTS, SUMS
from .table import OUTPUT_METRICS

#: by (layer, product), float64 [6]: the sums of `numerics.products`, and the ranks whose parts are in them
OutputSums = Mapping[tuple[str, str], torch.Tensor]


def output_columns(sums: OutputSums, kinds: Mapping[str, str], casts: Mapping[Key, Cast]) -> dict[str, list[Any]]:
    """Columns, a row a product, and behind them those of all experts of a layer as one.

    Args:
        kinds: of GEMMs, by name.
        casts: how operands were cast, by (layer, role), as far as that is known.
    """
    members: dict[tuple[str, str], list[str]] = {key: [key[0]] for key in sums}
    aggregates: dict[tuple[str, str], list[str]] = defaultdict(list)
    for layer, product in sums:
        if aggregate := aggregate_of(layer):
            aggregates[aggregate, product].append(layer)
    rows = []
    for (layer, product), layers in [*members.items(), *aggregates.items()]:
        total = torch.stack([sums[member, product] for member in layers]).sum(0)
        found = [cast for m in layers for role, _ in PRODUCTS[product] if (cast := casts.get((m, role)))]
        rows.append(
            {
                "layer": layer,
                "gemm": kinds[layers[0]],
                "product": product,
                "recipe": _common([cast.recipe for cast in found]),
                "scale_source": _common([cast.source for cast in found]),
                "experts": len(layers) if aggregate_of(layers[0]) else None,
                **_metrics(product, total.tolist()),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _common(values: Sequence[str]) -> str | None:
    return values[0] if len(set(values)) == 1 else MIXED if values else None


def _metrics(product: str, total: Sequence[float]) -> dict[str, int | float | None]:
    *values, stats = total
    of = dict(zip(SUMS, values, strict=True))
    (first, _), (second, _) = PRODUCTS[product]
    errors = {f"error_of_{role}": None for role in ("input", "weight", "grad_output")} | {
        "relative_error": _relative(of["error2"], of["output2"]),
        f"error_of_{first}": _relative(of["first_error2"], of["output2"]),
        f"error_of_{second}": _relative(of["second_error2"], of["output2"]),
    }
    return {"ranks": int(stats), "n": int(of["n"]), **{name: errors[name] for name in OUTPUT_METRICS}}


def _relative(error2: float, output2: float) -> float | None:
    """None of an output that is zero, or of operands with NaN or infinity."""
    ratio = error2 / output2 if output2 > 0 else torch.nan
    return ratio**0.5 if ratio == ratio and ratio != torch.inf else None

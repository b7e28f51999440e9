"""Did a GEMM return what is not the product of its operands, or did ranks not add up what they have computed? That needs
neither a baseline nor a reference run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from ....core.keys import RESULTS
from ...runs.run import Run
from .finding import Finding

_ADVICE = (
    "A GEMM returned what is not the product of its operands: whether it is seen on one rank or on all tells hardware from "
    "kernels, caches and communication. Sample it again with `triggers=['wrong_product']`, and dump its operands."
)
_ADVICE_ON_SUMS = (
    "Each rank's dW was looked at before it was added up, and the gradient after it: look at the collective, at what it is "
    "averaged by, at buckets, and at what adds up micro-batches. `replicas=True` tells whether ranks got the same."
)
#: as `product`: what ranks make of their dW
_REDUCTION = "reduction"
#: what is wrong about a result, in words
_SHAPES = {
    "all": "all of it",
    "rows": "some of its rows",
    "columns": "some of its columns",
    "values": "single values",
    "one value": "one value",
}
#: factors nearer to 1 are no factor that all values have in common
_LEAST_FACTOR = 2.0**-8


def wrong_product(run: Run) -> list[Finding]:
    """The first product of a run that is wrong; of several in one sample, the one whose result is farthest off."""
    rows = run.table("verification").filter(pl.col("product") != _REDUCTION)
    first = _first(rows)
    if first is None:
        return []
    told = f"{RESULTS[first['product']]} of {first['layer']} on rank {first['rank']} is off by {_times(first)}"
    told += f", in {_SHAPES[first['shape']]}{_factor(first)}{_place(first)}"
    if first["ranks"] > 1:
        told += f"; {first['ranks_beyond']} of {first['ranks']} ranks are wrong"
    told += _again(rows, first)
    if (others := _others(rows, first)) > 0:
        told += f"; {others} other products are wrong in the same sample"
    return [Finding("product", "wrong_product", "high", told, _ADVICE, first["layer"], None, first["step"], severity=1)]


def wrong_reduction(run: Run) -> list[Finding]:
    """The first gradient of a run that is not the sum of what ranks have computed."""
    rows = run.table("verification").filter(pl.col("product") == _REDUCTION)
    first = _first(rows)
    if first is None:
        return []
    ranks = f"what {first['ranks']} ranks computed" if first["ranks"] > 1 else "what its micro-batches computed"
    told = f"{RESULTS[_REDUCTION]} of {first['layer']} is not the sum of {ranks}: it is off by {_times(first)}"
    told += f", in {_SHAPES[first['shape']]}{_factor(first)}{_place(first)}{_again(rows, first)}"
    if (others := _others(rows, first)) > 0:
        told += f"; so it is of {others} more weights in the same sample"
    advice, layer = _ADVICE_ON_SUMS, first["layer"]
    return [Finding("reduction", "wrong_reduction", "high", told, advice, layer, None, first["step"], severity=1)]


def _first(rows: pl.DataFrame) -> Mapping[str, Any] | None:
    wrong = rows.filter(pl.col("outcome") == "beyond")
    if wrong.is_empty():
        return None
    return wrong.sort("step", pl.col("error_over_bound"), descending=[False, True]).row(0, named=True)


def _times(row: Mapping[str, Any]) -> str:
    times = row["error_over_bound"]
    return "a value that is not finite" if times is None or times == float("inf") else f"{times:.3g} times its bound"


def _factor(row: Mapping[str, Any]) -> str:
    factor = row["factor"]
    if row["shape"] != "all" or factor is None or abs(factor - 1) < _LEAST_FACTOR:
        return ""
    return f", by a factor of {factor:.5g}"


def _place(row: Mapping[str, Any]) -> str:
    at = [f"{name} {row[name]}" for name in ("row", "column") if row[name] is not None]
    return f" ({', '.join(at)})" if at and row["shape"] != "all" else ""


def _again(rows: pl.DataFrame, first: Mapping[str, Any]) -> str:
    """What the next sample says of the same product."""
    of_it = rows.filter((pl.col("layer") == first["layer"]) & (pl.col("product") == first["product"]))
    later = of_it.filter(pl.col("step") > first["step"]).sort("step")
    if later.is_empty():
        return "; no later sample has it"
    again = int((later["outcome"] == "beyond").sum())
    if not again:
        # Each sample checks other rows and columns, so a row or column that is wrong may still be there.
        told = ", so the fault is transient" if first["shape"] == "all" else " in other rows and columns"
        return f"; {len(later)} later sample{' is' if len(later) == 1 else 's are'} right{told}"
    return f"; {again} of {len(later)} later samples are wrong again"


def _others(rows: pl.DataFrame, first: Mapping[str, Any]) -> int:
    return int(((rows["step"] == first["step"]) & (rows["outcome"] == "beyond")).sum()) - 1

"""Rules about products: a GEMM that returned a wrong result, and ranks that did not add up their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import polars as pl

from ...analysis import thresholds
from ...analysis.diagnosis.facts import DiagnosedRecords, Facts, define_fact
from ...analysis.diagnosis.finding import Finding
from ...analysis.diagnosis.rule import register_rule
from ...core.keys import RESULTS, ROLES, SHOWN_AS
from ...core.text import format_number
from .table import OUTPUTS, VERIFICATION

#: value of the column `product` for the sum of dW over ranks
_REDUCTION = "reduction"
#: which part of a result is wrong, in words
_SHAPES = {
    "all": "all of it",
    "rows": "some of its rows",
    "columns": "some of its columns",
    "values": "single values",
    "one value": "one value",
}


class FirstWrongProduct(NamedTuple):
    """The first product whose error exceeds its bound. If a sample has several, the product with the largest error."""

    row: Mapping[str, Any]
    #: number of other wrong products in the same sample, number of later samples of this product, and how many of these
    #: samples are wrong
    others: int
    later: int
    again: int


@define_fact
def wrong_products(records: DiagnosedRecords) -> list[FirstWrongProduct]:
    """Return the first wrong product and the first wrong reduction."""
    rows = records.run.read_table(VERIFICATION.name)
    reduced = pl.col("product") == _REDUCTION
    return [found for some in (~reduced, reduced) if (found := _first(rows.filter(some))) is not None]


def _first(rows: pl.DataFrame) -> FirstWrongProduct | None:
    wrong = rows.filter(pl.col("outcome") == "beyond")
    if wrong.is_empty():
        return None
    row = wrong.sort("step", pl.col("error_over_bound"), descending=[False, True]).row(0, named=True)
    same = (pl.col("layer") == row["layer"]) & (pl.col("product") == row["product"])
    later = rows.filter(same, pl.col("step") > row["step"])
    others = wrong.filter(step=row["step"])
    return FirstWrongProduct(row, len(others) - 1, len(later), int((later["outcome"] == "beyond").sum()))


@register_rule(
    "wrong product", ("wrong_product", "wrong_reduction"), (wrong_products,), event="product", needs_no_baseline=True
)
def find_wrong_products(facts: Facts) -> Iterator[Finding]:
    """Name a product or a sum over ranks that exceeds its error bound. This rule needs no baseline.

    Example: dgrad reads an all-zero transposed copy, so dX of layers.1.proj is off by a factor of 0.
    """
    for row, others, later, again in wrong_products(facts):
        result, layer = RESULTS[row["product"]], row["layer"]
        reduction = row["product"] == _REDUCTION
        if reduction:
            ranks = f"what {row['ranks']} ranks computed" if row["ranks"] > 1 else "what its micro-batches computed"
            evidence = f"{result} of {layer} is not the sum of {ranks}: it is off by {_times(row)}"
        else:
            evidence = f"{result} of {layer} on rank {row['rank']} is off by {_times(row)}"
        evidence += f", in {_SHAPES[row['shape']]}{_factor(row)}{_place(row)}"
        if not reduction and row["ranks"] > 1:
            evidence += f"; {row['ranks_beyond']} of {row['ranks']} ranks are wrong"
        if not later:
            evidence += "; no later sample has it"
        elif again:
            evidence += f"; {again} of {later} later samples are wrong again"
        else:
            # Each sample checks other rows and columns, so a wrong row may still be there.
            end = ", so the fault is transient" if row["shape"] == "all" else " in other rows and columns"
            evidence += f"; {later} later sample{' is' if later == 1 else 's are'} right{end}"
        evidence += f"; {others} more are wrong in the same sample" if others else ""
        cause = "wrong_reduction" if reduction else "wrong_product"
        yield Finding("wrong product", cause, "proof", evidence, layer, None, row["step"])


def _times(row: Mapping[str, Any]) -> str:
    times = row["error_over_bound"]
    return (
        "a value that is not finite" if times is None or times == float("inf") else f"{format_number(times)} times its bound"
    )


def _factor(row: Mapping[str, Any]) -> str:
    factor = row["factor"]
    if row["shape"] != "all" or factor is None or round(factor, 2) == 1:
        return ""
    return f", by a factor of {factor:.5g}"


def _place(row: Mapping[str, Any]) -> str:
    places = [f"{name} {row[name]}" for name in ("row", "column") if row[name] is not None]
    return f" ({', '.join(places)})" if places and row["shape"] != "all" else ""


# The effect of an operand's error on outputs --------------------------------------------------------------------------


def describe_culprit(found: Finding, records: DiagnosedRecords) -> Iterator[str]:
    """Describe whether the culprit's error reaches outputs, and which operands cause the errors of its layer's products.

    Args:
        found: a finding about an operand.
    """
    rows = records.run.read_table(OUTPUTS.name)
    reached = _describe_reach(found, rows, None if records.baseline is None else records.baseline.read_table(OUTPUTS.name))
    if reached:
        yield reached
    verified = records.run.read_table(VERIFICATION.name)
    for product, result in RESULTS.items():
        here = (pl.col("layer") == found.layer) & (pl.col("product") == product) & (pl.col("step") >= (found.since or 0))
        shares = _share_errors(rows.filter(here), verified.filter(here))
        if shares:
            parts = ", ".join(f"{share:.0f}% {what}" for what, share in shares.items())
            yield f"the error of {result} is {parts}"


def _describe_reach(found: Finding, run: pl.DataFrame, baseline: pl.DataFrame | None) -> str:
    """Describe how an operand's share of output errors changed when it went out of band. "" if outputs were not measured."""
    part = f"error_of_{found.role}"
    if part not in run.columns:  # outputs of attention are not measured
        return ""
    of_layer = (pl.col("layer") == found.layer) & pl.col(part).is_not_null()
    after = run.filter(of_layer & (pl.col("step") >= found.since))
    usual = baseline.filter(of_layer) if baseline is not None else run.filter(of_layer & (pl.col("step") < found.since))
    told, grown = [], False
    for product in after["product"].unique(maintain_order=True):
        now, before = (rows.filter(product=product)[part].median() for rows in (after, usual))
        if isinstance(now, float) and isinstance(before, float):
            told.append(f"{format_number(before)} -> {format_number(now)} of the output of {product}")
            grown = grown or now > thresholds.FACTOR * before
    if not told:
        return ""
    return f"its error {'reaches' if grown else 'does not reach'} the outputs of GEMMs: {', '.join(told)}"


def _share_errors(outputs: pl.DataFrame, verification: pl.DataFrame) -> dict[str, float]:
    """Return each operand's share of a product's squared error, in percent. The joint share is negative if errors cancel."""
    rows = outputs.filter(pl.col("relative_error").is_not_null()).with_columns(pl.col("^.*error.*$") ** 2)
    if rows.is_empty():
        return {}
    squares = {role: rows[f"error_of_{role}"].mean() for role in ROLES}
    parts = {f"of {SHOWN_AS[role]}": float(value) for role, value in squares.items() if isinstance(value, float)}
    both = rows["relative_error"].mean()
    assert isinstance(both, float)
    parts["joint"] = both - sum(parts.values())
    known = verification["relative_error"].drop_nulls()
    rounding = (known.filter(known.is_finite()) ** 2).mean()
    if isinstance(rounding, float):
        parts["of accumulation and rounding"] = rounding
    return compute_percentages(parts)


def compute_percentages(parts: Mapping[str, float]) -> dict[str, float]:
    """Return each part in percent of the total, largest first. Return no parts if the total is zero."""
    total = sum(parts.values())
    shares = {what: 100 * value / total for what, value in parts.items()} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda part: -part[1]))

"""The rule about replicas: copies that differ although they must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import polars as pl

from ...analysis.diagnosis.facts import DiagnosedRecords, Facts, define_fact
from ...analysis.diagnosis.finding import Finding
from ...analysis.diagnosis.rule import register_rule

_SHOWN = {"master": "the master weight", "weight": "W", "weight_gradient": "the reduced dW", "input": "X"}
#: order of the tensors within a step
_ORDER = {"master": -1, "weight": 0, "input": 1, "weight_gradient": 2}


class CopiesApart(NamedTuple):
    """The first copies that differ."""

    row: Mapping[str, Any]
    #: number of other tensors that differ in the same sample
    more: int
    #: last earlier step with equal copies, or None
    equal_until: int | None


@define_fact
def copies_apart(records: DiagnosedRecords) -> CopiesApart | None:
    """Return the first copies that differ. Within a step, the order is that of `_ORDER`."""
    rows = records.run.read_table("replicas")
    apart = rows.filter(pl.col("outcome") == "apart")
    if apart.is_empty():
        return None
    order = pl.col("what").replace_strict(_ORDER, return_dtype=pl.Int64)
    row = apart.sort("step", order, maintain_order=True).row(0, named=True)
    equal = rows.filter(pl.col("step") < row["step"], pl.col("outcome") == "equal")["step"].sort()
    return CopiesApart(row, len(apart.filter(step=row["step"])) - 1, int(equal[-1]) if len(equal) else None)


@register_rule("replicas", ("replicas",), (copies_apart,), event="replica", needs_no_baseline=True)
def find_copies_apart(facts: Facts) -> Iterator[Finding]:
    """Name copies that differ although they must be equal on all ranks. This rule needs no baseline.

    Example: the last micro-batch is not reduced, so dW of layers.0.proj differs between two ranks.
    """
    found = copies_apart(facts)
    if found is None:
        return
    row, more, equal_until = found
    rank = f"rank {row['rank']} differs" if row["rank"] is not None else f"{row['ranks_apart']} differ"
    if row["what"] == "master":
        ranks = f"{row['ranks_apart']} of {row['ranks']} ranks"
        evidence = f"W of {row['layer']} is not what its master weight is cast to, on {ranks}: {rank}"
    else:
        evidence = (
            f"{_SHOWN[row['what']]} of {row['layer']} is not the same on the {row['ranks']} ranks that hold copies: {rank}"
        )
    evidence += f"; so do {more} more tensors in the same sample" if more else ""
    evidence += f"; equal up to {facts.unit} {equal_until}" if equal_until is not None else ", from the start or before"
    yield Finding("replicas", "replicas", "proof", evidence, row["layer"], None, row["step"])

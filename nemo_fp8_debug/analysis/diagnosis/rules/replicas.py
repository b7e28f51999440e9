"""Do ranks hold copies that ought to be equal and are not? That needs neither a baseline nor a reference run."""

from __future__ import annotations

import polars as pl

from ...runs.run import Run
from .finding import Finding

_ADVICE = (
    "Ranks hold different copies of what ought to be the same: look at the collective that makes them equal (all-gather of "
    "weights, all-reduce of gradients, broadcast at the start) and at the hardware of the rank that is apart."
)
#: what is compared, as people write it
_SHOWN = {"master": "the master weight", "weight": "W", "weight_gradient": "the reduced dW", "input": "X"}
#: within a step: what is there before what
_ORDER = {"master": -1, "weight": 0, "input": 1, "weight_gradient": 2}


def replicas(run: Run) -> list[Finding]:
    """The first copies of a run that are not equal, in the order of a step."""
    apart = run.table("replicas").filter(pl.col("outcome") == "apart")
    if apart.is_empty():
        return []
    order = pl.col("what").replace_strict(_ORDER, return_dtype=pl.Int64)
    row = apart.sort("step", order, maintain_order=True).row(0, named=True)
    of_step = apart.filter(pl.col("step") == row["step"])
    rank = f"rank {row['rank']} is apart" if row["rank"] is not None else f"{row['ranks_apart']} are apart"
    if row["what"] == "master":
        ranks = f"{row['ranks_apart']} of {row['ranks']} ranks"
        told = f"W of {row['layer']} is not what its master weight is cast to, on {ranks}: {rank}"
    else:
        copies = f"the {row['ranks']} ranks that hold copies"
        told = f"{_SHOWN[row['what']]} of {row['layer']} is not the same on {copies}: {rank}"
    if len(of_step) > 1:
        told += f"; so it is of {len(of_step) - 1} more tensors in the same sample"
    equal = run.table("replicas").filter((pl.col("step") < row["step"]) & (pl.col("outcome") == "equal"))
    told += f"; equal up to {run.unit} {equal['step'].sort()[-1]}" if len(equal) else ", from the start or before"
    return [Finding("replicas", "replicas", "high", told, _ADVICE, row["layer"], None, row["step"], severity=1)]

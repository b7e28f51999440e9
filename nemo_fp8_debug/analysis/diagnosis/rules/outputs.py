"""Does the error of an operand reach what GEMMs put out, and whose is that error?

An operand can lose most of its values and hurt nothing.
"""

from __future__ import annotations

import polars as pl

from ....core.keys import RESULTS, ROLES, SHOWN_AS
from ...formatting import number
from .finding import Finding

#: what an operand's part of the error of an output grows by when it reaches it
_GROWS = 1.5


def reach(found: Finding, run: pl.DataFrame, baseline: pl.DataFrame | None = None) -> Finding | None:
    """What an operand adds to the errors of outputs since it left; None where outputs were not measured.

    Args:
        found: about an operand.
        run: `outputs` table.
        baseline: likewise; without it the samples before the onset tell what is usual.
    """
    part = f"error_of_{found.role}"
    if part not in run.columns:  # outputs of attention are not measured
        return None
    of_layer = (pl.col("layer") == found.layer) & pl.col(part).is_not_null()
    after = run.filter(of_layer & (pl.col("step") >= found.since))
    usual = baseline.filter(of_layer) if baseline is not None else run.filter(of_layer & (pl.col("step") < found.since))
    told, grown = [], False
    for product in after["product"].unique(maintain_order=True):
        now, before = (rows.filter(product=product)[part].median() for rows in (after, usual))
        if isinstance(now, float) and isinstance(before, float):
            told.append(f"{number(before)} -> {number(now)} of the output of {product}")
            grown = grown or now > _GROWS * before
    if not told:
        return None
    what = "reaches" if grown else "does not reach"
    facts = f"its error {what} what the GEMMs put out: {', '.join(told)}"
    return Finding("outputs", found.cause if grown else "none", "high", facts, "", found.layer, found.role, found.since)


def error_budget(found: Finding, outputs: pl.DataFrame, verification: pl.DataFrame, states: pl.DataFrame) -> Finding | None:
    """Whose the error of each product of a layer is, and that of the steps of its weight, in parts of their squares that sum
    to 100%; None if neither was measured.

    Args:
        found: about an operand, whose layer it is.
        outputs, verification, states: tables of the run; without the second nothing is known of accumulation.
    """
    told = []
    for product, result in RESULTS.items():
        here = (pl.col("layer") == found.layer) & (pl.col("product") == product) & (pl.col("step") >= (found.since or 0))
        shares = _shares(outputs.filter(here), verification.filter(here))
        if shares:
            parts = ", ".join(f"{share:.0f}% {what}" for what, share in shares.items())
            told.append(f"of the error of {result}: {parts}")
    here = (pl.col("layer") == found.layer) & (pl.col("role") == "update") & (pl.col("step") >= (found.since or 0))
    if shares := _shares_of_update(states.filter(here)):
        parts = ", ".join(f"{share:.0f}% {what}" for what, share in shares.items())
        without = "" if "of dW" in shares else " (that of dW is not known)"
        told.append(f"of the error of the step of W{without}: {parts}")
    if not told:
        return None
    return Finding("error budget", "none", "high", "; ".join(told), "", found.layer, found.role, found.since)


def _shares(outputs: pl.DataFrame, verification: pl.DataFrame) -> dict[str, float]:
    """In percent, largest first; what two operands do together is joint, and may be less than nothing where they cancel."""
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
    return _in_percent(parts)


#: of the error of what a step adds to a weight
_OF_UPDATE = {
    "error_of_weight_gradient": "of dW",
    "error_of_first_moment": "of m",
    "error_of_second_moment": "of v",
    "error_of_weight": "of the rounding of W",
}


def _shares_of_update(states: pl.DataFrame) -> dict[str, float]:
    """Likewise, of what a step adds to a weight."""
    rows = states.filter(pl.col("update_error").is_not_null())
    if rows.is_empty():
        return {}
    # Samples in which the gradient's part is not known would make the others look larger.
    rows = known if len(known := rows.drop_nulls("error_of_weight_gradient")) else rows
    squares = {what: (rows[name] ** 2).mean() for name, what in _OF_UPDATE.items()}
    parts = {what: float(value) for what, value in squares.items() if isinstance(value, float)}
    both = (rows["update_error"] ** 2).mean()
    assert isinstance(both, float)
    return _in_percent(parts | {"joint": both - sum(parts.values())})


def _in_percent(parts: dict[str, float]) -> dict[str, float]:
    """Of their sum, largest first; nothing if that is zero."""
    total = sum(parts.values())
    shares = {what: 100 * value / total for what, value in parts.items()} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda part: -part[1]))

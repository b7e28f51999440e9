"""Whether what a record has metrics of was quantized in the run, or is what a recipe would do to it."""

from __future__ import annotations

import polars as pl

from ...core.keys import NOT_CAST


def is_cast(metrics: pl.DataFrame) -> pl.Series:
    """Of each row of a `metrics` table, whether its operand was quantized in the run."""
    return ~metrics["scale_source"].is_in(NOT_CAST)


def nothing_cast(metrics: pl.DataFrame, whose: str) -> str | None:
    """What to bear in mind about a run that quantizes nothing, as far as is known; None: it quantizes something.

    Args:
        metrics: `metrics` table.
        whose: how the run is called, as `the baseline`.

    Example:
        >>> import polars as pl
        >>> nothing_cast(pl.DataFrame({"scale_source": ["current"], "recipe": ["current-hybrid"]}), "the run")
        "Nothing is quantized in the run: its metrics say what current-hybrid would do to its operands."
    """
    if metrics.is_empty() or is_cast(metrics).any():
        return None
    recipes = ", ".join(sorted(metrics["recipe"].drop_nulls().unique())) or "a recipe"
    unknown = "unknown" in metrics["scale_source"]
    known = f"How the engine casts the operands of {whose} is unknown" if unknown else f"Nothing is quantized in {whose}"
    return f"{known}: its metrics say what {recipes} would do to its operands."

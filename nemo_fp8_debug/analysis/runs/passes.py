"""What one pass over the rows of some operands and steps tells; of stretches of steps, the results can be put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from .grid import Ints

if TYPE_CHECKING:
    from .metrics import Metrics


def unique(column: str, metrics: Metrics) -> list[str | None]:
    """Values of a text column, in the order of their first rows."""
    found: dict[str | None, None] = {}
    for chunk, _ in metrics.alike(column if column in metrics.columns else None):
        texts = chunk.rows[column].cast(pl.String) if chunk.rows.width else pl.repeat(None, len(chunk.operand), eager=True)
        found |= dict.fromkeys(texts.unique(maintain_order=True).to_list())
    return list(found)


def counted(column: str, values: Sequence[str | None], metrics: Metrics) -> Ints:
    """int64 [T, 1 + values that are texts]: how often each operand has none, and each of the values."""
    texts = pl.Enum([value for value in values if value is not None])
    width = len(texts.categories) + 1

    counts = np.zeros((len(metrics.tensors), width), dtype=np.int64)
    for chunk, times in metrics.alike(column if len(values) > 1 else None):
        codes = chunk.rows[column].cast(texts).to_physical().cast(pl.Int64) + 1 if len(values) > 1 else None
        of_rows = codes.fill_null(0).to_numpy() if codes is not None else int(values[:1] != [None])
        many = np.repeat(times, [len(operands) for _, operands in chunk.steps])
        counts += np.bincount(chunk.operand * width + of_rows, many, counts.size).astype(np.int64).reshape(counts.shape)
    return counts


def all_rows(columns: Sequence[str], metrics: Metrics) -> pl.DataFrame:
    """tensor, step and columns."""
    return pl.concat([metrics.none(columns).drop("count"), *metrics.scan(columns)])


def largest(weights: Metrics, whole: bool = False) -> Ints:
    """How many values each operand has at the most; -1 where that is not known.

    Args:
        whole: only samples that no rank is missing from count.
    """
    most = np.full(len(weights.tensors), -1)
    for rows in weights.scan(["n", "nan", "inf", *(["ranks_missing"] if whole else [])]):
        counted = rows.filter(ranks_missing=0) if whole else rows
        known = counted.select("tensor", n=pl.col("n") + pl.col("nan") + pl.col("inf")).drop_nulls()
        np.maximum.at(most, known["tensor"].to_numpy(), known["n"].to_numpy())
    return most


def gathered(columns: Sequence[str], gather: Callable[[pl.DataFrame], pl.DataFrame], metrics: Metrics) -> pl.DataFrame:
    """See `Metrics.gathered`."""
    found = gather(metrics.none(columns))
    for rows in metrics.scan(columns):
        found = gather(pl.concat([found, gather(rows.with_columns(count=pl.lit(1, pl.Int64)))], how="diagonal"))
    return found

"""How a number is written, and values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl


def number(value: float | None, unit: str = "", prefix: str = "") -> str:
    """Three digits of a metric; `-` where it is absent."""
    return "-" if value is None else f"{prefix}{value:.3g}{unit}"


def jsonable(value: Any) -> Any:
    """Return containers and numbers as JSON has them: null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(held) for held in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_rows(table: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows of a table, as `jsonable` makes them; many at once."""
    floats = [name for name, kind in table.schema.items() if kind == pl.Float64]
    finite = table.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in floats)
    rows: list[dict[str, Any]] = finite.to_dicts()
    return jsonable(rows) if any(kind.is_nested() for kind in table.dtypes) else rows

"""Convert values to plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import polars as pl


def make_jsonable(value: Any) -> Any:
    """Return a value in a form that JSON can represent. NaN and infinities become None.

    A table becomes a list of rows. An object with a method `to_json` becomes the result of this method. Any other dataclass
    becomes a dictionary of its fields.

    Example:
        >>> make_jsonable({"loss": np.float32("nan"), "rows": pl.DataFrame({"step": [0, 10]})})
        {'loss': None, 'rows': [{'step': 0}, {'step': 10}]}
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, pl.DataFrame):
        return _list_rows(value)
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): make_jsonable(held) for key, held in value.items()}
    return [make_jsonable(held) for held in value] if isinstance(value, (list, tuple)) else value


def _list_rows(table: pl.DataFrame) -> list[dict[str, Any]]:
    floats = [name for name, kind in table.schema.items() if kind == pl.Float64]
    finite = table.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in floats)
    rows: list[dict[str, Any]] = finite.to_dicts()
    return make_jsonable(rows) if any(kind.is_nested() for kind in table.dtypes) else rows

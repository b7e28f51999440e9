"""Tables of the record as objects, and the features that define them.

The writer, readers, SQL, TensorBoard and the tab work with any table, so their code names no table. Each folder of
`observations` is a feature. Its `PLACE` gives the position of its tables in a record. We import its modules by name:
`table`, `observer` (subscribes to events and sums over ranks), `scalars` (tags in TensorBoard), `two_runs` (compares two
records) and `rule` (rules of diagnosis). Modules that read a record import no observer.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

_PACKAGE = f"{__name__.partition('.')[0]}.observations"


@cache
def load_feature_modules(part: str) -> tuple[ModuleType, ...]:
    """Return the modules with this name, one for each feature that has such a module. Import them if necessary.

    Example:
        >>> [module.TABLES[0].name for module in load_feature_modules("table")][:2]
        ['metrics', 'outputs']
    """
    return tuple(_load_modules(part))


def _load_modules(part: str) -> Iterator[ModuleType]:
    folders = pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__)
    features = [importlib.import_module(f"{_PACKAGE}.{folder.name}") for folder in folders]
    for feature in sorted(features, key=lambda feature: feature.PLACE):
        name = f"{feature.__name__}.{part}"
        if importlib.util.find_spec(name) is not None:
            yield importlib.import_module(name)


#: columns of equal length, by name
Columns = Mapping[str, Sequence[Any]]
#: columns that identify the sample of a row
SAMPLE: dict[str, str] = {"attempt": "int32", "step": "int64"}


@dataclass(frozen=True)
class MetricDisplay:
    """The label of a column, and how a chart shows the column."""

    label: str
    unit: str = ""
    #: 1 if larger values are worse, -1 if smaller values are worse
    worse: int = 1
    #: scale of a chart's axis: "linear", "log" or "diverging"
    scale: str = "linear"


@dataclass(frozen=True)
class Table:
    """A table of the record.

    Attributes:
        name: name of its folder in the record.
        columns: type of each column, by name and in order. Types are names of `_ARROW` in `record/schema.py`.
        metrics: metrics that the tab offers and only this table has, by column.
        roles: roles of the tensors in its rows if the tab shows a map of the table, otherwise empty.
        histograms: name of the table with histograms of the same tensors, or "".
        by_step: whether each part of the record keeps rows of a step together. Tables with a list in each row do.
        is_added_later: whether several writers add rows to a record after its run.
        has_what_if: whether the table also has rows of what-if recipes. Their `scale_source` is `what-if`.
        checks: what a verdict advises to record if this table is missing, in words. "" for no advice.
        option: the option that records these rows, if a verdict may recommend this option.
    """

    name: str
    columns: Mapping[str, str]
    metrics: Mapping[str, MetricDisplay] = field(default_factory=dict)
    roles: Sequence[str] = ()
    histograms: str = ""
    by_step: bool = False
    is_added_later: bool = False
    has_what_if: bool = False
    checks: str = ""
    option: str = ""

    def count_rows(self, columns: Columns) -> int:
        """Return the number of rows."""
        return len(next(iter(columns.values()), ()))


def declare_columns(kind: str, *names: str) -> dict[str, str]:
    """Return columns that all have one type.

    Example:
        >>> declare_columns("float64", "mean", "largest")
        {'mean': 'float64', 'largest': 'float64'}
    """
    return dict.fromkeys(names, kind)


def concat_columns(parts: Sequence[Columns]) -> dict[str, list[Any]]:
    """Return the rows of several tables with the same columns, one after the other. Empty tables are left out.

    Example:
        >>> concat_columns([{"layer": ["a"]}, {}, {"layer": ["b", "c"]}])
        {'layer': ['a', 'b', 'c']}
    """
    filled = [part for part in parts if part]
    return {name: [value for part in filled for value in part[name]] for name in filled[0]} if filled else {}

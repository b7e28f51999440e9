"""Tables of the record as objects, and the features that bring them.

Writer, readers, SQL, TensorBoard and the tab work on any table and name none. A folder of `observations` is a feature. It
says in which `PLACE` of a record its tables come. Its modules are found by name: `table`, `observer` (what subscribes to
events and how it adds up over ranks), `scalars` (its tags in TensorBoard), `two_runs` (what sets two records apart) and
`rule` (what a diagnosis makes of its tables). Those that read a record import no observer.
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
def load_modules(part: str) -> tuple[ModuleType, ...]:
    """Import the module of this name of each feature that has one.

    Example:
        >>> [module.TABLES[0].name for module in load_modules("table")][:2]
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
#: columns that say which sample a row is of
SAMPLE: dict[str, str] = {"attempt": "int32", "step": "int64"}


@dataclass(frozen=True)
class Metric:
    """What people call a column, and how a chart shows it."""

    label: str
    unit: str = ""
    #: 1 if more is worse, -1 if less is
    worse: int = 1
    #: of a chart's axis: "linear", "log" or "diverging"
    scale: str = "linear"


@dataclass(frozen=True)
class Table:
    """A table of the record.

    Attributes:
        name: of its folder in the record.
        columns: type of each column, by name and in order: a name of `COLUMN_TYPES`.
        metrics: columns that no other table has and the tab offers, by name.
        roles: tensors that it has rows of, if the tab maps it; empty: it does not.
        histograms: name of the table that has histograms of the same tensors; empty: there is none.
        by_step: whether the parts keep the rows of a step together, as those with lists in each row do.
        is_added_later: whether rows are added to a record whose run is over, by several writers.
        has_what_if: whether rows of recipes that were tried are in it too; their `scale_source` is `what-if`.
        checks: what a verdict asks for if a record lacks it, as people call it; empty: it asks for nothing.
        option: which a run has to set for these rows, if a verdict asks for them.
    """

    name: str
    columns: Mapping[str, str]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    roles: Sequence[str] = ()
    histograms: str = ""
    by_step: bool = False
    is_added_later: bool = False
    has_what_if: bool = False
    checks: str = ""
    option: str = ""

    def count_rows(self, columns: Columns) -> int:
        """Return how many rows columns have."""
        return len(next(iter(columns.values()), ()))


def cast_columns(kind: str, *names: str) -> dict[str, str]:
    """Return columns of one type.

    Example:
        >>> cast_columns("float64", "mean", "largest")
        {'mean': 'float64', 'largest': 'float64'}
    """
    return dict.fromkeys(names, kind)


def concat_columns(parts: Sequence[Columns]) -> dict[str, list[Any]]:
    """Return the rows of several tables that have the same columns, one after the other; empty ones are left out.

    Example:
        >>> concat_columns([{"layer": ["a"]}, {}, {"layer": ["b", "c"]}])
        {'layer': ['a', 'b', 'c']}
    """
    filled = [part for part in parts if part]
    return {name: [value for part in filled for value in part[name]] for name in filled[0]} if filled else {}

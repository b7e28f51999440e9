"""What this package observes: a folder of `observations` for each feature, whose modules are found by name.

A folder may have `table` (its tables), `observer` (what subscribes to events and how it adds up over ranks), `scalars` (its
tags in TensorBoard), `two_runs` (what sets two records apart) and `rule` (what a diagnosis makes of its tables). Those that
read a record import no observer.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from types import ModuleType

#: in the order of the record's tables
FEATURES = ("operands", "products", "replicas", "states", "gradients", "activations", "steps")
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
    for feature in FEATURES:
        name = f"{_PACKAGE}.{feature}.{part}"
        if importlib.util.find_spec(name) is not None:
            yield importlib.import_module(name)

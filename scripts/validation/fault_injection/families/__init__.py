"""The models that the benchmark trains, each tiny."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from fault_injection.families.family import Family

_MODULES = {"llama": "huggingface", "moe": "huggingface", "vit": "vision", "gpt": "megatron", "te": "transformer_engine"}
FAMILIES = tuple(_MODULES)
#: modules of families that other packages add, by name
_ADDED: dict[str, str] = {}


def add_families(modules: Mapping[str, str]) -> None:
    """Make families of other packages known.

    Args:
        modules: by the name of each family, the module whose `FAMILIES` has it.
    """
    _ADDED.update(modules)


@cache
def family(name: str) -> Family:
    """The family of that name; only its framework is imported."""
    module = _ADDED.get(name) or f"fault_injection.families.{_MODULES[name]}"
    made: Family = importlib.import_module(module).FAMILIES[name]
    return made

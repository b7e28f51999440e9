"""The models that the benchmark trains, each tiny."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from fault_injection.families.family import Family

_MODULES = {"llama": "huggingface", "moe": "huggingface", "vit": "vision", "gpt": "megatron", "te": "transformer_engine"}
FAMILIES = tuple(_MODULES)
#: models that the benchmark was not made with, and those of them in whose view nothing was set
LATER = ("olmo", "phi", "modernbert", "mbart")
OTHERS = ("neox", "gemma", "qwen", "roberta", "t5", "deepseek", "mamba", *LATER)


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
    module = _ADDED.get(name, f"fault_injection.families.{_MODULES.get(name, 'others')}")
    made: Family = importlib.import_module(module).FAMILIES[name]
    return made

"""The models that the benchmark trains, each tiny."""

from __future__ import annotations

import importlib
from functools import cache

from fault_injection.families.family import Family

_MODULES = {"llama": "huggingface", "moe": "huggingface", "vit": "vision", "gpt": "megatron", "te": "transformer_engine"}
FAMILIES = tuple(_MODULES)
#: models that the benchmark was not made with, and those of them in whose view nothing was set
LATER = ("olmo", "phi", "modernbert", "mbart")
OTHERS = ("neox", "gemma", "qwen", "roberta", "t5", "deepseek", "mamba", *LATER)


@cache
def family(name: str) -> Family:
    """The family of that name; only its framework is imported."""
    made: Family = importlib.import_module(f"fault_injection.families.{_MODULES.get(name, 'others')}").FAMILIES[name]
    return made

"""Read layer names: strip wrappers, recognize experts, and match patterns."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from ..errors import ConfigError

#: path components that wrappers put between a model and its layers
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
#: an expert's name has its number after `experts`, and one of a grouped GEMM has it after the GEMM's name
_EXPERT = re.compile(r"((?:.*\.)?(?!shared_)(?:\w+_)?experts\.(?:[^.\d][^.]*\.(?=\d+$))?)\d+(\..+)?")

T = TypeVar("T")


def strip_wrappers(name: str) -> str:
    """Return a dotted name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@functools.lru_cache(maxsize=1 << 16)
def name_aggregate(name: str) -> str | None:
    """Return the name that this expert's GEMM shares with all experts, with `*` for the number. None if it is no expert's.

    `decoder.layers.3.mlp.experts.local_experts.17.linear_fc1` -> `decoder.layers.3.mlp.experts.local_experts.*.linear_fc1`
    """
    found = _EXPERT.fullmatch(name)
    return f"{found[1]}*{found[2] or ''}" if found else None


def aggregate_key(layer: str, role: str) -> tuple[str, str] | None:
    """Return (aggregate, role) of an expert's operand, or None if the layer is no expert's."""
    aggregate = name_aggregate(layer)
    return (aggregate, role) if aggregate else None


@functools.lru_cache(maxsize=1 << 16)
def is_aggregate(name: str) -> bool:
    """Return True if the name stands for all experts of a layer."""
    return "*" in name.split(".")


def few_experts(items: Iterable[T], aggregate: Callable[[T], Hashable | None], most: int) -> list[T]:
    """Return the items in order, at most `most` of those that share an aggregate.

    Args:
        aggregate: returns the aggregate of an item, or None if it is no expert's.
    """
    taken: Counter[Hashable] = Counter()
    kept = []
    for item in items:
        group = aggregate(item)
        if group is None or taken[group] < most:
            kept.append(item)
            taken[group] += 1
    return kept


def compile_patterns(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a test of layer names that is true if any pattern matches.

    A glob matches a whole name, its end (`linear_fc2`), or a part of the tree (`decoder.layers.3`); `re:` starts a regular
    expression, searched for anywhere in the name.

    Raises:
        ConfigError: a regular expression does not compile.
    """
    if patterns is None:
        return lambda name: True
    expressions = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ConfigError(f"layer pattern {pattern!r} is not a regular expression: {error}") from None
        else:
            glob = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
            expressions.append(re.compile(rf"(^|\.)(?:{glob})(\.|$)"))
    return lambda name: any(e.search(name) for e in expressions)

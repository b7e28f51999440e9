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
#: the number of an expert comes after `experts` in its name, or after the GEMM's name if the GEMM is grouped
_EXPERT = re.compile(r"((?:.*\.)?(?!shared_)(?:\w+_)?experts\.(?:[^.\d][^.]*\.(?=\d+$))?)\d+(\..+)?")

T = TypeVar("T")


def strip_wrappers(name: str) -> str:
    """Return a dotted name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@functools.lru_cache(maxsize=1 << 16)
def find_expert_aggregate(name: str) -> str | None:
    """Return the name of an expert's GEMM with `*` for the expert's number, or None for a GEMM outside experts.

    `decoder.layers.3.mlp.experts.local_experts.17.linear_fc1` -> `decoder.layers.3.mlp.experts.local_experts.*.linear_fc1`
    """
    found = _EXPERT.fullmatch(name)
    return f"{found[1]}*{found[2] or ''}" if found else None


def find_aggregate_key(layer: str, role: str) -> tuple[str, str] | None:
    """Return (aggregate, role) of an expert's operand, or None for a layer outside experts."""
    aggregate = find_expert_aggregate(layer)
    return (aggregate, role) if aggregate else None


@functools.lru_cache(maxsize=1 << 16)
def is_expert_aggregate(name: str) -> bool:
    """Return True if the name represents all experts of a layer."""
    return "*" in name.split(".")


def limit_experts_per_layer(items: Iterable[T], aggregate: Callable[[T], Hashable | None], most: int) -> list[T]:
    """Return the items in order, but at most `most` items of each aggregate.

    Args:
        aggregate: returns the aggregate of an item, or None for an item outside experts.
    """
    taken: Counter[Hashable] = Counter()
    kept = []
    for item in items:
        group = aggregate(item)
        if group is None or taken[group] < most:
            kept.append(item)
            taken[group] += 1
    return kept


def compile_layer_patterns(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a test of layer names that is true if any pattern matches.

    A glob matches a whole name, its end (`linear_fc2`), or a subtree (`decoder.layers.3`). `re:` starts a regular
    expression, which may match anywhere in the name.

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

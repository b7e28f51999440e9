"""In which order layers compute, as far as their names tell.

A record has layers as the model made them, which is the order of execution but for a few whose place in a block is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ...record.schema import Part
from .layouts import Layout, Tensors

#: made before its siblings and run behind them: Megatron's output projection of attention
_LAST = {"linear_proj"}
#: likewise if the sibling is there: `w2` of a gated MLP multiplies what `w1` and `w3` return
_BEHIND = {"w2": "w3"}
#: records whose order is kept
_KEPT = 32


def ordered(tensors: Iterable[tuple[str, str]]) -> Tensors:
    """(layer, role) of tensors, by layers in order of execution; those of a layer in the order that they have."""
    found = list(tensors)
    order = {layer: i for i, layer in enumerate(in_order_of_execution([layer for layer, _ in found]))}
    return Tensors(sorted(found, key=lambda key: order[key[0]]))


def tensors_of(layouts: Mapping[Part, Layout]) -> Tensors:
    """(layer, role) of the tensors that any part has, in order of execution."""
    return _of_any(tuple(dict.fromkeys(layout.tensors for layout in layouts.values())))


@lru_cache(_KEPT)
def _of_any(different: tuple[Tensors, ...]) -> Tensors:
    return ordered(dict.fromkeys(key for tensors in different for key in tensors))


def in_order_of_execution(layers: Sequence[str]) -> list[str]:
    """Each layer once, in the order in which a forward pass runs them.

    Example:
        >>> in_order_of_execution(["0.attention.linear_proj", "0.attention.linear_qkv", "0.mlp.linear_fc1"])
        ['0.attention.linear_qkv', '0.attention.linear_proj', '0.mlp.linear_fc1']
    """
    place = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
    last_of = {layer.rpartition(".")[0]: i for layer, i in place.items()}

    def key(layer: str) -> tuple[int, int]:
        block, _, name = layer.rpartition(".")
        sibling = f"{block}.{_BEHIND[name]}" if name in _BEHIND else None
        if name in _LAST:
            return last_of[block], 1
        return (place[sibling], 1) if sibling in place and place[sibling] > place[layer] else (place[layer], 0)

    return sorted(place, key=key)

"""Metrics of activations that a histogram cannot tell: of channels, of rows of attention, of the load of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...capture.operand_stats import OperandStats
from ...core.keys import Key
from .table import COUNTS, METRICS


def activation_columns(stats: Sequence[OperandStats], keys: Sequence[Key]) -> dict[str, list[Any]]:
    """Return columns of metrics that activations alone have; None where one cannot be had.

    Args:
        keys: (layer, role) of each row; an aggregate of experts has none of these metrics.
    """
    known = {s.key: _OF_ROLE[s.key[1]](s.further) for s in stats if s.further is not None and s.key[1] in _OF_ROLE}
    found = [known.get(key, {}) for key in keys]
    return {name: [of.get(name) for of in found] for name in (*COUNTS, *METRICS, "loads")}


def of_channels(sums: torch.Tensor) -> dict[str, float | None]:
    """Of the input or output of a norm.

    Args:
        sums: float64 [1 + C]: rows, and the sum of squares of each channel.

    Returns:
        The number of rows, the channel whose root mean square is the largest, and by how much it exceeds the median one.

    Example:
        >>> of_channels(torch.tensor([10.0, 1.0, 1.0, 400.0], dtype=torch.float64))
        {'rows': 10.0, 'channel': 2.0, 'channel_ratio': 20.0}
    """
    rows, squares = float(sums[0]), sums[1:]
    channel, median = int(squares.argmax()), float(squares.quantile(0.5))
    ratio = _ratio(float(squares[channel]), median)
    return {"rows": rows, "channel": float(channel), "channel_ratio": None if ratio is None else ratio**0.5}


def of_attention(sums: torch.Tensor) -> dict[str, float | None]:
    """Of rows of attention.

    Args:
        sums: float64 [3]: rows, the sum of the entropies of their weights, and of the weights of their first key.

    Example:
        >>> of_attention(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
        {'rows': 4.0, 'entropy': 0.5, 'sink_pct': 25.0}
    """
    rows, entropies, first = sums.tolist()
    sink = _ratio(first, rows)
    return {"rows": rows, "entropy": _ratio(entropies, rows), "sink_pct": None if sink is None else 100 * sink}


def of_router(sums: torch.Tensor) -> dict[str, Any]:
    """Of a router with E experts.

    Args:
        sums: float64 [3 + E]: tokens, the sum of their entropies, how many experts they asked for (0: not known), and how
            many tokens each expert was given.

    Returns:
        Tokens, their mean entropy in nats, the load of the expert with the most tokens over the mean, how many experts got
        none, the percentage of what was asked for that was dropped, and how many tokens each expert was given.

    Example:
        >>> of_router(torch.tensor([4.0, 2.0, 8.0, 4.0, 2.0, 0.0], dtype=torch.float64))
        {'rows': 4.0, 'entropy': 0.5, 'load_ratio': 2.0, 'idle_experts': 1.0, 'dropped_pct': 25.0, 'loads': [4, 2, 0]}
    """
    tokens, entropies, asked = sums[:3].tolist()
    load = sums[3:]
    given = float(load.sum())
    return {
        "rows": tokens,
        "entropy": _ratio(entropies, tokens),
        "load_ratio": _ratio(float(load.max()) * len(load), given),
        "idle_experts": float((load == 0).sum()) if given else None,
        "dropped_pct": 100 * (1 - given / asked) if asked and given else None,
        "loads": [int(n) for n in load.tolist()] if given else None,
    }


_OF_ROLE = {
    "norm_input": of_channels,
    "norm_output": of_channels,
    "attention_logits": of_attention,
    "router_logits": of_router,
}


def _ratio(a: float, b: float) -> float | None:
    """None where it is no number."""
    found = a / b if b else float("nan")
    return None if found != found or abs(found) == float("inf") else found

"""Histograms of a layer's experts as one, and that of the worst expert: what verdicts on experts need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.keys import Key
from ..core.layer_names import aggregate_key, is_aggregate
from ..numerics.limits import LIMITS, worst_of
from .checks import MAGNITUDES

Columns = Mapping[str, Sequence[Any]]

#: metrics that tell which expert is the worst
HARM = (*next(iter(LIMITS.values())), "relative_error")
#: experts from which on it saves anything
_LEAST = 3


def worst_experts(metrics: Columns) -> dict[Key, str]:
    """The expert of each aggregate that is farthest beyond a limit, or else loses the most.

    Args:
        metrics: columns `layer`, `role`, `n` and those of `HARM`, of one step.

    Returns:
        names of experts' layers by (aggregate, role).

    Example:
        >>> lost = {"underflow_pct": [1.0, 30.0], "overflow_pct": [0.0, 0.0], "scale_ratio_log2": [0.0, 0.0]}
        >>> named = {"layer": ["experts.0.fc1", "experts.1.fc1"], "role": ["input", "input"], "n": [4096, 4096]}
        >>> worst_experts({**named, **lost, "relative_error": [0.1, 0.1]})
        {('experts.*.fc1', 'input'): 'experts.1.fc1'}
    """
    found: dict[Key, tuple[tuple[float, ...], str]] = {}
    for i, (layer, role) in enumerate(zip(metrics["layer"], metrics["role"], strict=True)):
        if key := _aggregate(layer, role):
            harm = _harm(role, {name: metrics[name][i] for name in HARM}, metrics["n"][i])
            if key not in found or harm > found[key][0]:
                found[key] = harm, layer
    return {key: layer for key, (_, layer) in found.items()}


def _harm(role: str, metrics: Mapping[str, float | None], n: float | None) -> tuple[float, ...]:
    lost = (metrics["underflow_pct"] or 0) + (metrics["overflow_pct"] or 0)
    return worst_of(role, metrics, n)[1], lost, metrics["relative_error"] or 0


def _aggregate(layer: str, role: str) -> Key | None:
    return None if is_aggregate(layer) else aggregate_key(layer, role)


def one_and_worst(histograms: Columns, worst: Mapping[Key, str]) -> dict[str, list[Any]]:
    """Rows of histograms in which experts of an aggregate are two: all of them added up, and the worst.

    Experts stay as they are if their aggregate is there already, if they differ in recipe, format or dtype, if there are
    fewer than 3, or if nobody knows the worst. The scale of an aggregate is that of all its experts, or None.

    Args:
        histograms: columns of one step of one attempt; `bins` and `counts` are arrays.
        worst: as `worst_experts` returns it.

    Example:
        >>> cast = {"recipe": ["current"] * 3, "format": ["e4m3"] * 3, "dtype": ["bfloat16"] * 3}
        >>> named = {"layer": [f"experts.{i}.fc1" for i in range(3)], "role": ["input"] * 3}
        >>> of = {"rounded": [False] * 3, "scale": [1.0, 2.0, 2.0], "bins": [[7], [7], [9]], "counts": [[1], [2], [3]]}
        >>> rows = one_and_worst({**named, **cast, **of}, {("experts.*.fc1", "input"): "experts.2.fc1"})
        >>> rows["layer"], rows["scale"], [list(map(int, counts)) for counts in rows["counts"]]
        (['experts.2.fc1', 'experts.*.fc1'], [2.0, None], [[3], [3, 3]])
    """
    groups = _groups(histograms, worst)
    dropped = {i for key, rows in groups.items() for i in rows if histograms["layer"][i] != worst[key]}
    kept = [i for i in range(len(histograms["layer"])) if i not in dropped]
    added = [_added_up(histograms, key, rows) for key, rows in groups.items()]
    return {name: [values[i] for i in kept] + [row[name] for row in added] for name, values in histograms.items()}


def _groups(histograms: Columns, worst: Mapping[Key, str]) -> dict[Key, list[int]]:
    """Rows of the experts that become two, by (aggregate, role)."""
    groups: dict[Key, list[int]] = defaultdict(list)
    keys = list(zip(histograms["layer"], histograms["role"], strict=True))
    for i, key in enumerate(keys):
        if (aggregate := _aggregate(*key)) in worst and aggregate not in keys:
            groups[aggregate].append(i)  # type: ignore[index]
    kinds = list(zip(*(histograms[name] for name in ("recipe", "format", "dtype")), strict=True))
    layers = histograms["layer"]
    return {
        key: rows
        for key, rows in groups.items()
        if len({layers[i] for i in rows}) >= _LEAST and len({kinds[i] for i in rows}) == 1
    }


def _added_up(histograms: Columns, key: Key, rows: Sequence[int]) -> dict[str, Any]:
    counts = np.zeros(MAGNITUDES, np.int64)
    for i in rows:
        counts[np.asarray(histograms["bins"][i], np.int64)] += np.asarray(histograms["counts"][i], np.int64)
    bins = np.flatnonzero(counts)
    scales = {histograms["scale"][i] for i in rows}
    return {
        **{name: values[rows[0]] for name, values in histograms.items()},
        "layer": key[0],
        "rounded": any(histograms["rounded"][i] for i in rows),
        "scale": scales.pop() if len(scales) == 1 else None,
        "bins": bins.astype(np.uint16),
        "counts": counts[bins],
    }

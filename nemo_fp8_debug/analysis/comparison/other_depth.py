"""Baselines of another depth: a layer of one name lies as far from the input there, and not as far from the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import polars as pl

from ...core.keys import GRADIENTS
from .evidence import OF_GRADIENTS, OF_OTHER_MODELS
from .groups import around_depth, depth_of

_KEY = ["layer", "role"]


def depths_of(layers: Iterable[str]) -> int:
    """How many layers deep the model is whose GEMMs have these names; 0 if they do not tell."""
    return len({depth_of(name) for name in layers} - {None})


def differ_in_depth(baseline: Iterable[str], run: Iterable[str]) -> bool:
    """Whether both tell how deep their models are, and these are not alike."""
    depths = depths_of(baseline), depths_of(run)
    return all(depths) and depths[0] != depths[1]


def as_far_from_the_output(baseline: Iterable[str], run: Iterable[str]) -> dict[str, str]:
    """By the run's name of a layer, that of the baseline's which lies as far from the output, where that is another one.

    Example:
        >>> as_far_from_the_output(["layers.0.fc1", "layers.1.fc1"], ["layers.0.fc1", "layers.1.fc1", "layers.2.fc1"])
        {'layers.1.fc1': 'layers.0.fc1', 'layers.2.fc1': 'layers.1.fc1'}
    """
    theirs, mine = set(baseline), dict.fromkeys(run)
    last = [_last_of(each) for each in (theirs, mine)]
    found = {}
    for name in mine:
        if (parts := around_depth(name)) is None:
            continue
        before, at, behind = parts
        shift = last[0].get(before, 0) - last[1][before]
        other = f"{before}{at + shift}{behind}"
        if shift and other in theirs:
            found[name] = other
    return found


def _last_of(layers: Iterable[str]) -> dict[str, int]:
    """The highest index of each stack of layers, by what comes before it."""
    last: dict[str, int] = {}
    for name in layers:
        if (parts := around_depth(name)) is not None:
            last[parts[0]] = max(last.get(parts[0], 0), parts[1])
    return last


def that_count(
    out_of_band: pl.DataFrame, names: Mapping[str, str], beside: Callable[[pl.DataFrame], pl.DataFrame]
) -> pl.DataFrame:
    """What counts of that which is out of the band of a baseline of another depth.

    Gradients come from the output. They are also compared with those of the layer that is as far from it, whose band they
    must be out of as well, by more than where models are alike.

    Args:
        out_of_band: as of `onsets`.
        names: as of `as_far_from_the_output`.
        beside: of some tensors (layer, role; names of the run) what is out of the band of those layers.
    """
    strong = _strong(out_of_band)
    asked = strong.filter(_IS_GRADIENT, pl.col("layer").cast(pl.String).is_in(list(names))).select(_KEY).unique()
    if asked.is_empty():
        return strong
    within = asked.join(_strong(beside(asked)), on=_KEY, how="anti").select(*_KEY, within=True)
    told = strong.join(within, on=_KEY, how="left", maintain_order="left")
    return told.filter(pl.col("within").is_null() | ~_IS_GRADIENT).drop("within")


_IS_GRADIENT = pl.col("role").is_in(GRADIENTS) & (pl.col("metric") != "nonfinite")


def _strong(rows: pl.DataFrame) -> pl.DataFrame:
    least = pl.when(pl.col("role").is_in(GRADIENTS)).then(OF_GRADIENTS).otherwise(OF_OTHER_MODELS)
    return rows.filter((pl.col("metric") == "nonfinite") | (pl.col("excess") >= least))

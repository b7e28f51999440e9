"""Figures of a recorded run under another recipe, from its sketches: "would current scaling have saved it?"."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from ..numerics import figures
from ..numerics.figures import FIGURES
from ..numerics.formats import FORMATS, FloatFormat
from ..numerics.scaling import CurrentScaling, DelayedState, Recipe, parse_recipe
from ..numerics.sketch import Sketch, SketchBatch
from ..record.store import FIGURE_SCHEMA, find_run, read_table

_CURRENT = CurrentScaling()
_KEY = ["layer", "role"]


def replay(path: str | os.PathLike[str], recipe: str | Mapping[str, Any] | None = None) -> pl.DataFrame:
    """Recompute every figure of a run from its sketches.

    Delayed scaling takes its history from the sampled steps, and the tensor's own amax where it has none yet. Micro-batches
    that were cast with one scale were recorded as one sketch, so current scaling gives them one scale here. Float32 operands
    were recorded rounded to bfloat16, and are left out.

    Args:
        path: the run's folder, or one above it.
        recipe: as for `parse_recipe`; None: the scales that were in use, which gives the recorded figures again.

    Returns:
        Rows of the `figures` table.

    Raises:
        RecordError: the record is missing or cannot be read.
        ConfigError: the recipe cannot be used.
    """
    run = find_run(path)
    sketches = read_table(run, "sketches").filter(~pl.col("rounded"))
    recorded = read_table(run, "figures")
    scales = _Recorded() if recipe is None else _Emulated(parse_recipe(recipe), sketches)
    frames = [pl.DataFrame(schema=FIGURE_SCHEMA)]
    for step, rows in sketches.group_by("step", maintain_order=True):
        about = recorded.filter(pl.col("step") == step[0])
        frames.append(_step(rows, about, scales))
    return pl.concat(frames)


def _step(rows: pl.DataFrame, about: pl.DataFrame, scales: _Recorded | _Emulated) -> pl.DataFrame:
    """The figures of one step; a row of `rows` is a part of an operand, all cast with one scale."""
    parts = list(_sketches(rows))
    operands = rows.select(_KEY).unique(maintain_order=True).with_row_index("owner")
    owner = torch.from_numpy(rows.join(operands, on=_KEY, maintain_order="left")["owner"].to_numpy().astype(np.int64))
    totals = [sum(rest, first) for first, *rest in _grouped(parts, owner, len(operands))]
    moments = figures.moments(SketchBatch.of(totals))
    batch = SketchBatch.of(parts)
    names, formats, scale = scales.of(rows, batch)
    sums = figures.quantization_sums(batch, scale, formats).fold(owner, len(operands))

    first = torch.tensor([int((owner == i).nonzero()[0]) for i in range(len(operands))], dtype=torch.int64)
    limits = torch.tensor([formats[i].max for i in first], dtype=torch.float32)
    amax = moments.amax.float()
    current = _CURRENT.scale(amax, limits)
    in_use = torch.zeros(len(operands), dtype=torch.float32).index_reduce_(0, owner, scale, "amin", include_self=False)
    measured = figures.figures(moments, sums, in_use, current)
    scales.end_step(operands, amax)
    columns = {
        "recipe": [names[i] for i in first],
        "format": [formats[i].name for i in first],
        "n": moments.n.tolist(),
        "nan": moments.nan.tolist(),
        "inf": moments.inf.tolist(),
        "scale": in_use.double().tolist(),
        "scale_current": current.double().tolist(),
        **{name: [None if v != v else v for v in measured[name].tolist()] for name in FIGURES},
    }
    kept = [c for c in FIGURE_SCHEMA if c not in columns]
    described = operands.join(about.select(kept), on=_KEY, how="left", maintain_order="left")
    return described.with_columns(**{k: pl.Series(v, dtype=FIGURE_SCHEMA[k]) for k, v in columns.items()}).select(
        list(FIGURE_SCHEMA)
    )


def _sketches(rows: pl.DataFrame) -> Iterator[Sketch]:
    for dtype, bins, counts in rows.select("dtype", "bins", "counts").iter_rows():
        sketch = Sketch(getattr(torch, dtype))
        sketch.counts[torch.tensor(bins, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)
        yield sketch


def _grouped(parts: Sequence[Sketch], owner: torch.Tensor, n: int) -> list[list[Sketch]]:
    groups: list[list[Sketch]] = [[] for _ in range(n)]
    for part, i in zip(parts, owner.tolist(), strict=True):
        groups[i].append(part)
    return groups


class _Recorded:
    """The scales that were in use."""

    def of(self, rows: pl.DataFrame, batch: SketchBatch) -> tuple[list[str], list[FloatFormat], torch.Tensor]:
        """Recipe names, formats and scales (float32) of the parts."""
        scale = torch.from_numpy(rows["scale"].to_numpy().copy()).float()
        return rows["recipe"].to_list(), [FORMATS[name] for name in rows["format"]], scale

    def end_step(self, operands: pl.DataFrame, amax: torch.Tensor) -> None:
        """Nothing carries over."""


class _Emulated:
    """The scales that a recipe would have used."""

    def __init__(self, recipe: Recipe, sketches: pl.DataFrame) -> None:
        self._recipe = recipe
        self._state = DelayedState(recipe, sketches.select(_KEY).unique(maintain_order=True).rows())
        self._seen: set[tuple[str, str]] = set()

    def of(self, rows: pl.DataFrame, batch: SketchBatch) -> tuple[list[str], list[FloatFormat], torch.Tensor]:
        """Recipe names, formats and scales (float32) of the parts."""
        keys = rows.select(_KEY).rows()
        formats = [self._recipe.format_of(role) for _, role in keys]
        limits = torch.tensor([fmt.max for fmt in formats], dtype=torch.float32)
        rule = self._recipe.scaling
        scale = (rule if isinstance(rule, CurrentScaling) else _CURRENT).scale(batch.amax(), limits)
        if not isinstance(rule, CurrentScaling):
            held = self._state.scale[torch.tensor([self._state.index[key] for key in keys])]
            scale = torch.where(torch.tensor([key in self._seen for key in keys]), held, scale)
        return [self._recipe.name] * len(keys), formats, scale

    def end_step(self, operands: pl.DataFrame, amax: torch.Tensor) -> None:
        keys = operands.select(_KEY).rows()
        self._state.amax[torch.tensor([self._state.index[key] for key in keys])] = amax
        self._seen.update(keys)
        self._state.update()

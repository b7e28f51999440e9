"""Several runs that went well: what one of them does too, beside the first, is no sign of anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from ...errors import ConfigError
from ..loss.alignment import align
from ..runs.run import Run
from .layer_matching import named_alike, sizes_of_weights

#: times as far out as another baseline that an operand must be
_FARTHER = 2.0
_KEY = ["layer", "role", "metric"]


def nearest_first(run: Run, baselines: Sequence[Run]) -> list[Run]:
    """That which saw the run's batches before the others, if there is one: it tells the most."""
    if len(baselines) < 2:
        return [*baselines]
    return sorted(baselines, key=lambda each: not align(run.loss, each.loss).paired)


def of_one_model(first: Run, others: Sequence[Run]) -> list[Run]:
    """Others with the names of the first for their layers; those without samples count by their loss.

    Raises:
        ConfigError: one is of another model, so that no mean can be taken.
        RecordError: as of `named_alike`.
    """
    return [each if each.metrics.is_empty() else _alike(first, each) for each in others]


def told_of(first: Run, others: Sequence[Run], run: Run) -> list[str]:
    """What further baselines are taken for, in sentences."""
    if not others:
        return []
    count = "Another baseline is" if len(others) == 1 else f"{len(others)} more baselines are"
    told = [f"{count} looked at: what one of them does too, beside {first.path}, is not told."]
    unsampled = [each.path for each in others if each.metrics.is_empty()]
    if unsampled:
        told.append(f"Of these {', '.join(unsampled)} has no sampled step and counts by its loss alone.")
    if align(run.loss, first.loss).paired:
        told.append(f"{first.path} saw the run's batches, so it comes first, and the loss is compared with it alone.")
    return told


def _alike(first: Run, other: Run) -> Run:
    alike, _ = named_alike(first, other)
    sizes = [sizes_of_weights(each.metrics) for each in (first, alike)]
    if set(sizes[0]) != set(sizes[1]) or any(_differ(sizes[0][name], sizes[1][name]) for name in sizes[0]):
        raise ConfigError(
            f"{other.path} and {first.path} are of different models: baselines that are given together must be of one model"
        )
    return alike


def _differ(one: int | None, other: int | None) -> bool:
    return None not in (one, other) and one != other


def beyond_others(
    out_of_band: pl.DataFrame, others: Sequence[Run], beside_the_first: Callable[[Run], pl.DataFrame]
) -> pl.DataFrame:
    """What is out of the first baseline's band, without what others are out of it by too; NaN is never usual.

    Args:
        out_of_band: as of `onsets`.
        beside_the_first: of another baseline, what it is out of the first one's band by.
    """
    sampled = [each for each in others if not each.metrics.is_empty()]
    if out_of_band.is_empty() or not sampled:
        return out_of_band
    theirs = pl.concat(beside_the_first(each) for each in sampled)
    usual = theirs.group_by(_KEY).agg(usual=pl.col("excess").max())
    known = out_of_band.join(usual, on=_KEY, how="left", maintain_order="left")
    farther = pl.col("usual").is_null() | (pl.col("excess") > _FARTHER * pl.col("usual"))
    return known.filter(farther | (pl.col("metric") == "nonfinite")).drop("usual")

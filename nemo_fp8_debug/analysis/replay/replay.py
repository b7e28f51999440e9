"""Compute the metrics of a recorded run under another recipe, for example to see if current scaling would have helped.

The metrics are computed from histograms or from dumped tensors. For 16-bit operands and one scale per tensor, both give the
same result. Steps are computed in parallel, on this machine or on a cluster. Delayed scales depend on earlier steps, so we
first compute the scales from the recorded amax.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import joblib
import numpy as np
import polars as pl
import torch

from ...core.keys import Key
from ...core.layer_names import find_aggregate_key, is_expert_aggregate
from ...errors import ConfigError, RecordError
from ...numerics.block_scaling import BlockScalingRule
from ...numerics.delayed_state import EmulatedScales
from ...numerics.histogram import Histogram
from ...numerics.metric_columns import unscale_gradient_columns
from ...numerics.recipe import BF16_RECIPE, Recipe, parse_recipe, refuse_block_scaling
from ...numerics.tensor_scaling import CurrentScaling
from ...record.dump import dumped_files
from ...record.reader import find_record, read_step_scalars
from ...record.schema import SCHEMAS
from ...record.storage import FolderStorage
from ...record.writer import add_rows_to_table
from ..runs.metrics import MetricsTable
from .recomputed import (
    OPERAND,
    RecomputedMetrics,
    ReplayedCalls,
    ReplayJob,
    group_calls_by_operand,
    read_dumped_tensors,
    read_step_histograms,
    recompute_from_histograms,
    recompute_from_tensors,
)

_J = TypeVar("_J")
_R = TypeVar("_R")

#: with fewer jobs, starting processes takes longer than the work
_FEW = 16


def map_in_parallel(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str | None = None) -> list[_R]:
    """Return the results of `call` for each job, in order.

    Args:
        cluster: `ray` for the Ray cluster of this machine, `ray://HOST:PORT` for another Ray cluster, or `tcp://HOST:PORT`
            for the scheduler of a Dask cluster. None: this machine, with several processes if there are many jobs.

    Raises:
        ConfigError: the cluster is unreachable, or its package is not installed.
    """
    if cluster is None:
        if len(jobs) < _FEW:
            return [call(job) for job in jobs]
        return _run(call, jobs)
    try:
        if cluster.partition(":")[0] == "ray":
            return _on_ray(call, jobs, cluster)
        if "://" in cluster:
            return _on_dask(call, jobs, cluster)
    except (ImportError, OSError, ConnectionError, RuntimeError) as error:
        raise ConfigError(f"no connection to the cluster {cluster}: {type(error).__name__}: {error}") from None
    raise ConfigError(f"unknown cluster {cluster!r}; use ray, ray://HOST:PORT, or tcp://HOST:PORT for Dask")


def _run(call: Callable[[_J], _R], jobs: Sequence[_J]) -> list[_R]:
    results: list[_R] = joblib.Parallel(n_jobs=-1)(joblib.delayed(call)(job) for job in jobs)
    return results


def _on_ray(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str) -> list[_R]:
    import ray
    from ray.util.joblib import register_ray

    if not ray.is_initialized():
        ray.init(cluster if cluster != "ray" else None, log_to_driver=False)
    register_ray()
    with joblib.parallel_config("ray"):
        return _run(call, jobs)


def _on_dask(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str) -> list[_R]:
    from distributed import Client

    with Client(cluster) as client, joblib.parallel_config("dask", client=client):
        return _run(call, jobs)


#: sources of recomputed metrics
SOURCES = ("histograms", "dumps")


def replay(
    address: str | os.PathLike[str],
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    source: str = "histograms",
    cluster: str | None = None,
    steps: Collection[int] | None = None,
    only: Collection[Key] | None = None,
) -> pl.DataFrame:
    """Recompute all metrics of a run, under its own recipe or another recipe.

    For delayed scaling, the amax history has only the sampled steps. If it is still empty, we use the tensor's own amax.
    Under current scaling, all micro-batches of a step get one scale, as under what-if recipes. Histograms of float32
    operands contain values that were rounded to bfloat16, so their rows are approximate. Rows from dumps are exact. If a run
    uses a block recipe, histograms yield only the metrics that need no scale.

    Args:
        address: the run's record, or a folder above it; any fsspec address.
        recipe: a name with or without options (`current-e4m3`, `delayed(margin=1)`), or a dict (`{"name": "delayed",
            "margin": 1}`). None: the scales that were in use, which reproduces the recorded metrics.
        source: "histograms", or "dumps" for the tensors that the first rank dumped.
        cluster: `ray`, `ray://HOST:PORT`, or `tcp://HOST:PORT` of a Dask scheduler; None: processes of this machine.
        steps: sampled steps to recompute; None: all steps. Amax histories always include all sampled steps.
        only: operands to recompute, (layer, role) each. An aggregate selects all its experts. None: all operands.

    Returns:
        A polars frame with rows of the `replayed` table; `rounded` marks approximate rows. Unreadable files are left out
        with a warning.

    Raises:
        RecordError: there is no record.
        ConfigError: the recipe or the cluster is invalid.

    Example:
        >>> rows = replay("runs/bad", "current-e5m2", steps=[60])
        >>> rows["recipe"].unique().to_list(), len(rows)
        (['current-e5m2'], 27)
    """
    wanted = None if recipe is None else parse_recipe(recipe)
    return replay_recipes(address, [wanted], source, cluster, steps, only)[0]


def replay_recipes(
    address: str | os.PathLike[str],
    recipes: Sequence[Recipe | None],
    source: str = "histograms",
    cluster: str | None = None,
    steps: Collection[int] | None = None,
    only: Collection[Key] | None = None,
) -> list[pl.DataFrame]:
    """Replay a run under several recipes, but read its record only once. Return one frame for each recipe.

    The other arguments are those of `replay`.
    """
    run = find_record(address)
    for recipe in recipes if source == "histograms" else ():
        if recipe:
            refuse_block_scaling(recipe, "replay from histograms, which do not contain blocks (dumps do),")
    metrics = _keep(MetricsTable.read(run), only)
    recorded = (metrics if steps is None else metrics.select_steps(np.array(sorted(steps)))).read_all_rows()
    scales = _scales(metrics, recipes)
    known = pl.col("grad_scale").is_finite() & (pl.col("grad_scale") != 0)
    multipliers = dict(read_step_scalars(run, ["step", "grad_scale"]).filter(known).iter_rows())
    of_steps = [(int(step[0]), about) for step, about in recorded.group_by("step", maintain_order=True)]
    if source == "dumps":
        there = {(attempt, step) for attempt, step, rank, _ in dumped_files(run) if rank == 0}
        of_steps = [(step, about) for step, about in of_steps if (about["attempt"][0], step) in there]
    jobs = [
        [
            ReplayJob(str(run), source, recipe, step, about, of_recipe.get(step, {}), multipliers.get(step), only)
            for recipe, of_recipe in zip(recipes, scales, strict=True)
        ]
        for step, about in of_steps
    ]
    frames = zip(*map_in_parallel(_replay_step, jobs, cluster), strict=True) if jobs else ([] for _ in recipes)
    return [pl.concat([pl.DataFrame(schema=SCHEMAS["replayed"]), *of_recipe]) for of_recipe in frames]


def _keep(metrics: MetricsTable, only: Collection[Key] | None) -> MetricsTable:
    """Return the metrics of some operands. If an operand is an aggregate, include its experts."""
    if only is None:
        return metrics
    keys = metrics.tensors.select(OPERAND)
    kept = pl.Series([key in only or find_aggregate_key(*key) in only for key in keys.rows()], dtype=pl.Boolean)
    return metrics.select_tensors_by_key(keys.filter(kept))


def _scales(
    metrics: MetricsTable, recipes: Sequence[Recipe | None]
) -> list[dict[int, dict[Key, torch.Tensor | CurrentScaling | BlockScalingRule]]]:
    """Return the scales that each recipe would have used for each operand, by sampled step."""
    if not any(recipes):
        return [{} for _ in recipes]
    recorded = metrics.read_all_rows(["amax"])
    recorded = recorded.filter(~pl.col("layer").map_elements(is_expert_aggregate, pl.Boolean))
    operands = recorded.select(OPERAND).unique(maintain_order=True).rows()
    emulated = [EmulatedScales(recipe, operands) if recipe else None for recipe in recipes]
    found: list[dict[int, Any]] = [{} for _ in recipes]
    for step, about in recorded.group_by("step", maintain_order=True):
        keys = about.select(OPERAND).rows()
        amax = torch.tensor(about["amax"].fill_null(0).to_list(), dtype=torch.float32)
        for of_recipe, scales in zip(emulated, found, strict=True):
            if of_recipe:
                scales[int(step[0])] = {key: of_recipe.next_scale(key) for key in keys}
                of_recipe.update_amax_histories(keys, amax)
    return found


def _replay_step(jobs: Sequence[ReplayJob]) -> list[pl.DataFrame]:
    """Recompute one step under several recipes."""
    run, counted = FolderStorage(jobs[0].run), cache(partial(read_step_histograms, FolderStorage(jobs[0].run), jobs[0]))
    return [
        # For BF16, leave out values that were already rounded to BF16, because they would show no error.
        _replay_calls(
            counted(job.recipe == BF16_RECIPE) if job.source == "histograms" else read_dumped_tensors(run, job), job
        )
        for job in jobs
    ]


def _replay_calls(parts: Sequence[ReplayedCalls], job: ReplayJob) -> pl.DataFrame:
    counted = [part for part in parts if isinstance(part.values, Histogram)]
    found = [recompute_from_histograms(counted, job)] if counted else []
    found += [
        recompute_from_tensors(group, job)
        for group in group_calls_by_operand(p for p in parts if isinstance(p.values, torch.Tensor))
    ]
    if not found:
        return pl.DataFrame(schema=SCHEMAS["replayed"])
    return _as_rows(
        job,
        RecomputedMetrics.concat(found).append_expert_aggregates(dict.fromkeys(job.about.select(OPERAND).rows())).columns(),
    )


def _as_rows(job: ReplayJob, columns: dict[str, list[Any]]) -> pl.DataFrame:
    """Return rows of the `replayed` table. Columns that do not depend on the recipe come from the recorded rows."""
    schema = SCHEMAS["replayed"]
    columns |= unscale_gradient_columns(columns, job.multiplier)
    measured = pl.DataFrame({name: pl.Series(values, dtype=schema[name]) for name, values in columns.items()})
    kept = [name for name in schema if name not in columns or name in OPERAND]
    known = job.about.select(kept)
    if job.recipe is not None:
        known = known.with_columns(scale_source=pl.lit("what-if"))
    return measured.join(known, on=OPERAND, how="left", maintain_order="left").select(list(schema))


def write_replayed_rows(address: str | os.PathLike[str], replayed: pl.DataFrame) -> None:
    """Add replayed rows to the table `replayed` of the record.

    Raises:
        RecordError: there is no record, or it is not writable.
    """
    run = find_record(address)
    try:
        add_rows_to_table(run, "replayed", replayed)
    except Exception as error:  # drivers of remote file systems raise errors of their own
        raise RecordError(f"the record at {run} cannot be written: {error}") from None

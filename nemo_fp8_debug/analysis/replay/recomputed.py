"""Recompute the metrics of operands from histograms (all operands at once) or from dumped tensors (one by one)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch

from ...core.keys import Key
from ...core.layer_names import find_aggregate_key
from ...errors import warn
from ...numerics import metrics
from ...numerics.block_scaling import BlockScalingRule
from ...numerics.expert_groups import ExpertAggregates
from ...numerics.formats import FORMATS, FloatFormat
from ...numerics.histogram import DTYPES, Histogram, HistogramBatch
from ...numerics.metric_columns import make_metric_columns
from ...numerics.metrics import QuantizationSums, ValueMoments
from ...numerics.recipe import Recipe, find_recipe
from ...numerics.tensor_scaling import CurrentScaling
from ...record.dump import dumped_files, read_dump
from ...record.reader import read_table_rows
from ...record.storage import FolderStorage

#: columns that identify the operand of a row
OPERAND = ["layer", "role"]


@dataclass(frozen=True)
class ReplayJob:
    """A step to recompute, with all data that another process needs."""

    run: str
    source: str
    #: the recipe, or None to use the recorded scales
    recipe: Recipe | None
    step: int
    #: the step's recorded rows
    about: pl.DataFrame
    scales: Mapping[Key, torch.Tensor | CurrentScaling | BlockScalingRule]
    #: factor by which the gradients of this step are multiplied, such as a loss scale
    multiplier: float | None
    #: operands to recompute; None: all operands
    only: Collection[Key] | None

    def wants(self, key: Key) -> bool:
        """Return True if an operand is to be recomputed."""
        return self.only is None or key in self.only or find_aggregate_key(*key) in self.only


@dataclass(frozen=True)
class ReplayedCalls:
    """Calls of an operand that were cast with the same scale: as a histogram, or as the tensor if a histogram is not
    enough.
    """

    key: Key
    values: Histogram | torch.Tensor
    recipe: str
    format: FloatFormat
    #: the scale; NaN if each block had its own scale
    scale: float


def read_step_histograms(run: FolderStorage, job: ReplayJob, exact: bool) -> list[ReplayedCalls]:
    """Return the recorded histograms of the job's step.

    Args:
        exact: whether to leave out histograms of values rounded to BF16.
    """
    table = read_table_rows(run, "histograms", where={"step": job.step} | ({"rounded": False} if exact else {}))
    names = ("layer", "role", "dtype", "rounded", "bins", "counts", "recipe", "format", "scale")
    table = table.join(job.about.select(OPERAND), on=OPERAND, how="semi", maintain_order="left")
    parts = []
    for layer, role, dtype, rounded, bins, counts, *rest in table.select(names).iter_rows():
        histogram = Histogram(getattr(torch, dtype), rounded=bool(rounded))
        histogram.counts[torch.tensor(bins, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)
        parts.append(
            ReplayedCalls((layer, role), histogram, rest[0], FORMATS[rest[1]], math.nan if rest[2] is None else rest[2])
        )
    return parts


def read_dumped_tensors(run: FolderStorage, job: ReplayJob) -> list[ReplayedCalls]:
    """Return the tensors that the first rank dumped, as histograms if histograms are enough."""
    from ...kernels import count_histogram  # imported here, because the import compiles kernels

    parts: dict[tuple[Key, int], ReplayedCalls] = {}
    under_blocks = recompute_in_blocks(job)
    recorded = {
        (layer, role): math.nan if s is None else s for layer, role, s in job.about.select(*OPERAND, "scale").iter_rows()
    }
    for attempt, step, rank, name in dumped_files(run):
        if (attempt, step, rank) != (job.about["attempt"][0], job.step, 0):
            continue
        try:
            about, tensors = read_dump(run, name)
        except (OSError, ValueError) as error:
            warn(f"{run.path(name)} is left out because it is unreadable: {error}")
            continue
        key, x, scale = (about.layer, about.role), tensors["value"], float(tensors["scale"])
        if not job.wants(key):
            continue
        if recipe := under_blocks.get(key):
            part = ReplayedCalls(key, x, recipe.name, recipe.get_format(about.role), math.nan)
        else:
            part = ReplayedCalls(key, count_histogram(x) if x.dtype in DTYPES else x, about.recipe, about.format, scale)
        if about.scale_source != "engine" and isinstance(part.values, Histogram):
            part = replace(part, scale=recorded.get(key, scale))
        # Merge calls that had the same scale into one histogram, as in the record.
        apart = about.scale_source == "engine" and about.recipe.startswith("current")
        group = key, about.call if apart or isinstance(part.values, torch.Tensor) else -1
        parts[group] = _together(parts[group], part) if group in parts else part
    return list(parts.values())


def recompute_in_blocks(job: ReplayJob) -> dict[Key, Recipe]:
    """Return the block recipe of each operand that is to be measured under a block recipe."""
    found = {}
    for layer, role, name in job.about.select(*OPERAND, "recipe").iter_rows():
        recipe = job.recipe or find_recipe(name)
        if recipe and recipe.uses_block_scaling:
            found[layer, role] = recipe
    return found


def _together(first: ReplayedCalls, second: ReplayedCalls) -> ReplayedCalls:
    assert isinstance(first.values, Histogram) and isinstance(second.values, Histogram)
    return replace(first, values=first.values + second.values)


@dataclass(frozen=True)
class RecomputedMetrics:
    """Recomputed moments and sums of B operands."""

    keys: list[Key]
    recipes: list[str]
    #: common histogram of all calls; None for float32 operands
    totals: list[Histogram | None]
    moments: ValueMoments
    sums: QuantizationSums
    #: smallest scale of each operand's calls, float32 [B]
    scale: torch.Tensor
    formats: list[FloatFormat]

    @classmethod
    def concat(cls, parts: Sequence[RecomputedMetrics]) -> RecomputedMetrics:
        """Concatenate the operands of all parts, in order."""
        return cls(
            [key for part in parts for key in part.keys],
            [recipe for part in parts for recipe in part.recipes],
            [total for part in parts for total in part.totals],
            ValueMoments.concat([part.moments for part in parts]),
            QuantizationSums.concat([part.sums for part in parts]),
            torch.cat([part.scale for part in parts]),
            [fmt for part in parts for fmt in part.formats],
        )

    def append_expert_aggregates(self, recorded: Collection[Key]) -> RecomputedMetrics:
        """Append each recorded aggregate of experts whose experts were all recomputed."""
        experts: dict[Key, list[Key]] = defaultdict(list)
        for layer, role in recorded:
            if aggregate := find_aggregate_key(layer, role):
                experts[aggregate].append((layer, role))
        place = {key: i for i, key in enumerate(self.keys)}
        aggregates = [key for key, mine in experts.items() if key in recorded and all(expert in place for expert in mine)]
        members = {key: [place[expert] for expert in experts[key]] for key in aggregates}
        _, sums, scale = ExpertAggregates(members, len(self.keys)).append_aggregate_rows(
            range(len(self.keys)), self.sums, self.scale, self.moments.amax
        )
        firsts = [rows[0] for rows in members.values()]
        totals = [_added_up([self.totals[i] for i in rows]) for rows in members.values()]
        moments = [
            metrics.merge_moments(self.moments.rows(torch.tensor(rows)))
            if total is None
            else metrics.compute_histogram_moments(HistogramBatch.pack_histograms([total]))
            for rows, total in zip(members.values(), totals, strict=True)
        ]
        return RecomputedMetrics(
            self.keys + aggregates,
            self.recipes + [self.recipes[i] for i in firsts],
            self.totals + totals,
            ValueMoments.concat([self.moments, *moments]),
            sums,
            scale,
            self.formats + [self.formats[i] for i in firsts],
        )

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of `make_metric_columns`, and the columns that identify rows."""
        about: dict[str, list[Any]] = {
            "layer": [layer for layer, _ in self.keys],
            "role": [role for _, role in self.keys],
            "recipe": list(self.recipes),
            "rounded": [total is not None and total.rounded for total in self.totals],
        }
        return about | make_metric_columns(self.moments, self.sums, self.scale, self.formats)


def _added_up(histograms: Sequence[Histogram | None]) -> Histogram | None:
    known = [histogram for histogram in histograms if histogram is not None]
    return Histogram.sum_histograms(known) if len(known) == len(histograms) else None


def group_calls_by_operand(parts: Iterable[ReplayedCalls]) -> list[list[ReplayedCalls]]:
    """Group parts by operand."""
    groups: dict[Key, list[ReplayedCalls]] = defaultdict(list)
    for part in parts:
        groups[part.key].append(part)
    return list(groups.values())


def recompute_from_histograms(parts: Sequence[ReplayedCalls], job: ReplayJob) -> RecomputedMetrics:
    """Recompute all operands at once from their histograms."""
    groups = group_calls_by_operand(parts)
    if job.recipe is not None:  # one scale for all calls
        groups = [[replace(g[0], values=sum((p.values for p in g[1:]), g[0].values))] for g in groups]
    ordered, n = [part for group in groups for part in group], len(groups)
    owner = torch.from_numpy(np.repeat(np.arange(n), [len(group) for group in groups]))
    batch = HistogramBatch.pack_histograms([part.values for part in ordered])  # type: ignore[misc]
    totals: list[Any] = [sum((p.values for p in g[1:]), g[0].values) for g in groups]
    scale, formats = _casts(ordered, batch.amax(), job)
    return RecomputedMetrics(
        [group[0].key for group in groups],
        [_recipe_of(group[0], job) for group in groups],
        totals,
        metrics.compute_histogram_moments(HistogramBatch.pack_histograms(totals)),
        metrics.quantization_sums_of_histograms(batch, scale, formats).sum_rows_by_owner(owner, n),
        torch.full((n,), torch.inf).scatter_reduce_(0, owner, scale, "amin"),
        list(dict(zip(owner.tolist(), formats, strict=True)).values()),
    )


def recompute_from_tensors(parts: Sequence[ReplayedCalls], job: ReplayJob) -> RecomputedMetrics:
    """Measure one operand directly from its tensors, for float32 and block recipes."""
    from ...kernels import quantization_sums

    tensors: list[torch.Tensor] = [part.values for part in parts]  # type: ignore[misc]
    recipe, role = recompute_in_blocks(job).get(parts[0].key), parts[0].key[1]
    each, whole, total = _moments(tensors)
    amax = each.amax if job.recipe is None else whole.amax.expand(len(parts))
    scale, formats = _casts(parts, amax.float(), job)
    casts = [recipe.scaling] * len(parts) if recipe else scale
    sums = QuantizationSums.concat(
        [quantization_sums(x, by, role, fmt).summed_row for x, by, fmt in zip(tensors, casts, formats, strict=True)]
    )
    recipes = [_recipe_of(parts[0], job)]
    return RecomputedMetrics([parts[0].key], recipes, [total], whole, sums.sum_rows(), scale.amin()[None], formats[:1])


def _recipe_of(part: ReplayedCalls, job: ReplayJob) -> str:
    return job.recipe.name if job.recipe else part.recipe


def _moments(tensors: Sequence[torch.Tensor]) -> tuple[ValueMoments, ValueMoments, Histogram | None]:
    """Return the moments of each tensor, the moments of all tensors together, and their common histogram if it is exact."""
    from ...kernels import count_histogram

    if tensors[0].dtype in DTYPES:
        first, *rest = histograms = [count_histogram(x) for x in tensors]
        total = sum(rest, first)
        return (
            metrics.compute_histogram_moments(HistogramBatch.pack_histograms(histograms)),
            metrics.compute_histogram_moments(HistogramBatch.pack_histograms([total])),
            total,
        )
    each = ValueMoments.concat([metrics.compute_float32_moments(x) for x in tensors])
    return each, metrics.merge_moments(each), None


def _casts(parts: Sequence[ReplayedCalls], amax: torch.Tensor, job: ReplayJob) -> tuple[torch.Tensor, list[FloatFormat]]:
    """Return the scale, float32 [P], and the format of each part: as recorded, or as the job's recipe, if it has a recipe,
    chooses them for the part's amax.
    """
    if job.recipe is None:
        return torch.tensor([part.scale for part in parts]).float(), [part.format for part in parts]
    formats = [job.recipe.get_format(part.key[1]) for part in parts]
    scale = torch.empty(len(parts))
    for i, part in enumerate(parts):
        held = job.scales.get(part.key, CurrentScaling())
        if isinstance(held, CurrentScaling):
            held = held.compute_scale(amax[i], formats[i].max)
        scale[i] = held if isinstance(held, torch.Tensor) else torch.nan
    return scale, formats

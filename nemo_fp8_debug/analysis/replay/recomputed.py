"""Operands measured again: from histograms in one go, from tensors one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...core.keys import Key
from ...core.layer_names import aggregate_key
from ...numerics import metrics
from ...numerics.expert_groups import ExpertAggregates
from ...numerics.formats import FloatFormat
from ...numerics.histogram import DTYPES, Histogram, HistogramBatch
from ...numerics.metric_columns import rows
from ...numerics.metrics import Moments, QuantizationSums
from ...numerics.tensor_scaling import CurrentScaling
from .job import Job, Part
from .sources import in_blocks


@dataclass(frozen=True)
class Recomputed:
    """Operands that were recomputed."""

    keys: list[Key]
    recipes: list[str]
    #: of all calls together; None of float32 operands
    totals: list[Histogram | None]
    moments: Moments
    sums: QuantizationSums
    #: float32 [B], the smallest of those that calls were cast with
    scale: torch.Tensor
    formats: list[FloatFormat]

    @classmethod
    def concat(cls, parts: Sequence[Recomputed]) -> Recomputed:
        """The operands of all parts, in order."""
        return cls(
            [key for part in parts for key in part.keys],
            [recipe for part in parts for recipe in part.recipes],
            [total for part in parts for total in part.totals],
            Moments.concat([part.moments for part in parts]),
            QuantizationSums.concat([part.sums for part in parts]),
            torch.cat([part.scale for part in parts]),
            [fmt for part in parts for fmt in part.formats],
        )

    def with_folds(self, recorded: Collection[Key]) -> Recomputed:
        """The same, and behind them the recorded aggregates of experts that were all recomputed."""
        experts: dict[Key, list[Key]] = defaultdict(list)
        for layer, role in recorded:
            if aggregate := aggregate_key(layer, role):
                experts[aggregate].append((layer, role))
        place = {key: i for i, key in enumerate(self.keys)}
        aggregates = [key for key, mine in experts.items() if key in recorded and all(expert in place for expert in mine)]
        members = {key: [place[expert] for expert in experts[key]] for key in aggregates}
        _, sums, scale = ExpertAggregates(members, len(self.keys)).append_to(
            range(len(self.keys)), self.sums, self.scale, self.moments.amax
        )
        firsts = [rows[0] for rows in members.values()]
        totals = [_added_up([self.totals[i] for i in rows]) for rows in members.values()]
        moments = [
            metrics.merge(self.moments.rows(torch.tensor(rows)))
            if total is None
            else metrics.moments(HistogramBatch.of([total]))
            for rows, total in zip(members.values(), totals, strict=True)
        ]
        return Recomputed(
            self.keys + aggregates,
            self.recipes + [self.recipes[i] for i in firsts],
            self.totals + totals,
            Moments.concat([self.moments, *moments]),
            sums,
            scale,
            self.formats + [self.formats[i] for i in firsts],
        )

    def columns(self) -> dict[str, list[Any]]:
        """As `rows`, and what they are about."""
        about: dict[str, list[Any]] = {
            "layer": [layer for layer, _ in self.keys],
            "role": [role for _, role in self.keys],
            "recipe": list(self.recipes),
            "rounded": [total is not None and total.rounded for total in self.totals],
        }
        return about | rows(self.moments, self.sums, self.scale, self.formats)


def _added_up(histograms: Sequence[Histogram | None]) -> Histogram | None:
    known = [histogram for histogram in histograms if histogram is not None]
    return Histogram.total(known) if len(known) == len(histograms) else None


def by_key(parts: Iterable[Part]) -> list[list[Part]]:
    """The parts of each operand."""
    groups: dict[Key, list[Part]] = defaultdict(list)
    for part in parts:
        groups[part.key].append(part)
    return list(groups.values())


def of_histograms(parts: Sequence[Part], job: Job) -> Recomputed:
    """All operands at once, from their histograms."""
    groups = by_key(parts)
    if job.recipe is not None:  # one scale for all calls
        groups = [[replace(g[0], values=sum((p.values for p in g[1:]), g[0].values))] for g in groups]
    ordered, n = [part for group in groups for part in group], len(groups)
    owner = torch.from_numpy(np.repeat(np.arange(n), [len(group) for group in groups]))
    batch = HistogramBatch.of([part.values for part in ordered])  # type: ignore[misc]
    totals: list[Any] = [sum((p.values for p in g[1:]), g[0].values) for g in groups]
    scale, formats = _casts(ordered, batch.amax(), job)
    return Recomputed(
        [group[0].key for group in groups],
        [_recipe_of(group[0], job) for group in groups],
        totals,
        metrics.moments(HistogramBatch.of(totals)),
        metrics.quantization_sums(batch, scale, formats).sum_by_owner(owner, n),
        torch.full((n,), torch.inf).scatter_reduce_(0, owner, scale, "amin"),
        list(dict(zip(owner.tolist(), formats, strict=True)).values()),
    )


def of_tensors(parts: Sequence[Part], job: Job) -> Recomputed:
    """One operand, measured directly: of float32, or under a block recipe."""
    from ...kernels import quantization_sums

    tensors: list[torch.Tensor] = [part.values for part in parts]  # type: ignore[misc]
    recipe, role = in_blocks(job).get(parts[0].key), parts[0].key[1]
    each, whole, total = _moments(tensors)
    amax = each.amax if job.recipe is None else whole.amax.expand(len(parts))
    scale, formats = _casts(parts, amax.float(), job)
    casts = [recipe.scaling] * len(parts) if recipe else scale
    sums = QuantizationSums.concat(
        [quantization_sums(x, by, role, fmt).whole for x, by, fmt in zip(tensors, casts, formats, strict=True)]
    )
    recipes = [_recipe_of(parts[0], job)]
    return Recomputed([parts[0].key], recipes, [total], whole, sums.total(), scale.amin()[None], formats[:1])


def _recipe_of(part: Part, job: Job) -> str:
    return job.recipe.name if job.recipe else part.recipe


def _moments(tensors: Sequence[torch.Tensor]) -> tuple[Moments, Moments, Histogram | None]:
    """Moments of each tensor, those of all of them as one, and the histogram of these, where it is exact."""
    from ...kernels import histogram_of

    if tensors[0].dtype in DTYPES:
        first, *rest = histograms = [histogram_of(x) for x in tensors]
        total = sum(rest, first)
        return metrics.moments(HistogramBatch.of(histograms)), metrics.moments(HistogramBatch.of([total])), total
    each = Moments.concat([metrics.moments_of_float32(x) for x in tensors])
    return each, metrics.merge(each), None


def _casts(parts: Sequence[Part], amax: torch.Tensor, job: Job) -> tuple[torch.Tensor, list[FloatFormat]]:
    """Scale, float32 [P], and format of each part: those in use, or what the job's recipe makes of its amax."""
    if job.recipe is None:
        return torch.tensor([part.scale for part in parts]).float(), [part.format for part in parts]
    formats = [job.recipe.format_of(part.key[1]) for part in parts]
    scale = torch.empty(len(parts))
    for i, part in enumerate(parts):
        held = job.scales.get(part.key, CurrentScaling())
        if isinstance(held, CurrentScaling):
            held = held.scale(amax[i], formats[i].max)
        scale[i] = held if isinstance(held, torch.Tensor) else torch.nan
    return scale, formats

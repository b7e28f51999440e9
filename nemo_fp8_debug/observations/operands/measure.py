"""Compute the metrics of a sampled step from its statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...capture.operand_stats import OperandStats, merge_operand_stats
from ...core.layer_names import find_expert_aggregate, is_expert_aggregate
from ...core.table import concat_columns
from ...kernels.cpu.histograms import Histograms
from ...numerics.delayed_state import EmulatedScales
from ...numerics.expert_groups import ExpertAggregates
from ...numerics.formats import FORMATS, FloatFormat
from ...numerics.metric_columns import make_block_scale_columns, make_metric_columns
from ...numerics.metrics import QuantizationSums, ValueMoments
from ...numerics.tensor_scaling import CurrentScaling

Rows = dict[str, list[Any]]
#: the GEMM that multiplies the column-wise copy of an operand
PRODUCT_OF_COPY = {"input": "wgrad", "weight": "dgrad", "grad_output": "wgrad"}


#: metrics of a cast's error
_OF_ERRORS = ("underflow_pct", "overflow_pct", "mse", "relative_error", "sqnr_db", "cosine")


@dataclass(frozen=True)
class OperandMeasurements:
    """Measurements of some tensors, in columns."""

    #: metrics of the tensors as the run cast them
    metrics: Rows
    histograms: Rows
    #: metrics under recipes that were not in use
    what_if: Rows
    #: metrics of the copies of operands that are cast for other products
    copies: Rows
    #: scales of blocks
    block_scales: Rows
    #: norms, in the order of the rows of `metrics`
    norms: list[float]


def measure_tensors(
    stats: Sequence[OperandStats], others: Sequence[EmulatedScales] = (), names: Collection[str] = frozenset()
) -> OperandMeasurements:
    """Return all metrics of the tensors, and of each layer's experts together.

    Args:
        others: what-if recipes. If a recipe is measured from histograms, float32 operands are left out, because their
            histograms are rounded.
        names: names of the observed GEMMs. They determine the number of experts of each aggregate, because experts without a
            sample count too.
    """
    aggregates = ExpertAggregates.group_experts(
        [s.key for s in stats], [(s.cast.recipe, s.cast.format, s.cast.dtype) for s in stats]
    )
    aggregated = [merge_operand_stats(key, [stats[i] for i in of]) for key, of in aggregates.members.items()]
    totals = Histograms([s.histogram for s in stats])
    moments = _moments(stats, totals)
    if aggregated:
        moments = ValueMoments.concat([moments, _moments(aggregated, Histograms([s.histogram for s in aggregated]))])
    experts = Counter(
        aggregate for name in {*names, *(s.key[0] for s in stats)} if (aggregate := find_expert_aggregate(name))
    )
    operands = _Operands([*stats, *aggregated], aggregates, totals, moments, experts)
    scale, sums = _in_use(stats, operands)
    described: Rows = {
        "recipe": [s.cast.recipe for s in operands.rows],
        "scale_source": [s.cast.source for s in operands.rows],
        "nonfinite_order": [s.nonfinite_order for s in operands.rows],
    }
    formats = [FORMATS[s.cast.format] for s in operands.rows]
    measured = operands.columns(range(len(stats)), sums, scale, lambda rows: [formats[i] for i in rows]) | described
    _leave_out_errors_of_stored(measured)
    return OperandMeasurements(
        metrics=measured,
        histograms=_histograms(stats, scale),
        what_if=_what_if(stats, operands, others),
        copies=_copies(stats, operands),
        block_scales=_block_scales(operands),
        norms=moments.sum_x2.double().sqrt().tolist(),
    )


def _leave_out_errors_of_stored(columns: Rows) -> None:
    """Remove the errors of tensors that are stored only as codes, because their values before the cast are unknown."""
    for i, source in enumerate(columns["scale_source"]):
        if source == "stored":
            for name in _OF_ERRORS:
                columns[name][i] = None


def _copies(stats: Sequence[OperandStats], operands: _Operands) -> Rows:
    """Return the rows of copies with blocks in the other direction, or with another cast than in `metrics`."""
    chosen = [i for i, s in enumerate(stats) if s.copy is not None and s.cast.copy_recipe]
    if not chosen:
        return {}
    sums = QuantizationSums.concat([c for i in chosen if (c := stats[i].copy) is not None])
    scale = torch.full((len(chosen),), torch.nan)
    casts = [row.cast for row in operands.rows]
    index, *_ = operands.aggregates.append_aggregate_rows(chosen, sums, scale, operands.moments.amax)
    columns = operands.columns(chosen, sums, scale, lambda rows: [FORMATS[casts[i].copy_format] for i in rows])
    return columns | {
        "product": [PRODUCT_OF_COPY[operands.rows[i].key[1]] for i in index],
        "recipe": [casts[i].copy_recipe for i in index],
        "scale_source": [casts[i].copy_source for i in index],
    }


def _block_scales(operands: _Operands) -> Rows:
    """Return the distribution of block scales, for operands that are cast in blocks."""
    counted = [s for s in operands.rows if s.block_scales is not None]
    if not counted:
        return {}
    rules: list[Any] = [s.cast.parsed_recipe.scaling for s in counted]
    found = make_block_scale_columns(torch.stack([s.block_scales for s in counted if s.block_scales is not None]), rules)
    return operands.about(counted) | {
        "recipe": [s.cast.recipe for s in counted],
        "format": [s.cast.format for s in counted],
        "scale_source": [s.cast.source for s in counted],
        **found,
    }


@dataclass(frozen=True)
class _Operands:
    """The data of a sample that do not depend on scales.

    A row for each operand comes first, then a row for each aggregate of experts.
    """

    rows: Sequence[OperandStats]
    aggregates: ExpertAggregates
    #: histograms of operands only
    histograms: Histograms
    moments: ValueMoments
    #: number of experts by aggregate
    experts: Mapping[str, int]

    def columns(
        self,
        chosen: Sequence[int],
        sums: QuantizationSums,
        scale: torch.Tensor,
        formats: Callable[[Sequence[int]], Sequence[FloatFormat]],
    ) -> Rows:
        """Return the rows of chosen operands and of their aggregates.

        Args:
            sums: sums of the chosen operands.
            scale: scales of the chosen operands, float32.
            formats: returns the formats of rows.
        """
        index, sums, scale = self.aggregates.append_aggregate_rows(chosen, sums, scale, self.moments.amax)
        at = torch.tensor(index, dtype=torch.int64)
        shown = [self.rows[i] for i in index]
        return self.about(shown) | make_metric_columns(self.moments.rows(at), sums, scale, formats(index))

    def about(self, stats: Sequence[OperandStats]) -> Rows:
        """Return the columns that identify rows."""
        return {
            "layer": [s.key[0] for s in stats],
            "gemm": [s.kind for s in stats],
            "role": [s.key[1] for s in stats],
            "dtype": [s.cast.dtype for s in stats],
            "calls": [s.calls for s in stats],
            "ranks": [s.ranks for s in stats],
            "ranks_missing": [s.missing for s in stats],
            "experts": [self._experts(s.key[0]) for s in stats],
        }

    def _experts(self, layer: str) -> int | None:
        return self.experts[layer] if is_expert_aggregate(layer) else 1 if find_expert_aggregate(layer) else None


def _in_use(stats: Sequence[OperandStats], operands: _Operands) -> tuple[torch.Tensor, QuantizationSums]:
    """Return the scale of each operand, float32 [B], or NaN if unknown, and its sums under the scales of its casts."""
    scale = torch.tensor([s.scales[0] if s.scales else torch.nan for s in stats], dtype=torch.float32)
    limits = torch.tensor([FORMATS[s.cast.format].max for s in stats], dtype=torch.float32)
    amax = operands.moments.amax[: len(stats)].float()
    rules = [_rule(s) if s.scales is None else None for s in stats]
    for rule in set(filter(None, rules)):
        scale = torch.where(torch.tensor([r == rule for r in rules]), rule.compute_scale(amax, limits), scale)
    rest = [i for i, s in enumerate(stats) if not s.sums]
    of_histograms = operands.histograms.select(rest).quantization_sums(
        scale[rest], [FORMATS[stats[i].cast.format] for i in rest]
    )
    summed = {i: s.sums for i, s in enumerate(stats) if s.sums}
    return scale, QuantizationSums.concat([of_histograms, *summed.values()]).rows(_order([*rest, *summed]))


def _order(places: Sequence[int]) -> torch.Tensor:
    """Return the index that sorts rows by their places, int64 [B]."""
    return torch.tensor(places, dtype=torch.int64).argsort()


def _rule(stat: OperandStats) -> CurrentScaling | None:
    """Return the rule that computes a scale from the amax of the whole tensor, or None."""
    rule = stat.cast.parsed_recipe.scaling
    if isinstance(rule, CurrentScaling):
        return rule
    return CurrentScaling() if stat.sums is None else None  # delayed scaling without a history yet


def _moments(stats: Sequence[OperandStats], totals: Histograms) -> ValueMoments:
    """Return each operand's moments, from its histogram or, if the histogram is rounded, as measured directly."""
    of_histograms = totals.value_moments
    direct = {i: s.moments for i, s in enumerate(stats) if s.moments}
    rest = [i for i in range(len(stats)) if i not in direct]
    rows = ValueMoments.concat([of_histograms.rows(torch.tensor(rest, dtype=torch.int64)), *direct.values()])
    return rows.rows(_order([*rest, *direct])).with_median(of_histograms.median)


def _what_if(stats: Sequence[OperandStats], operands: _Operands, others: Sequence[EmulatedScales]) -> Rows:
    by_histograms = _what_if_by_histograms(stats, operands, [o for o in others if not o.recipe.uses_block_scaling])
    return concat_columns([*by_histograms, *_what_if_directly(stats, operands, others)])


def _what_if_by_histograms(
    stats: Sequence[OperandStats], operands: _Operands, others: Sequence[EmulatedScales]
) -> list[Rows]:
    tables = []
    for other in others:
        chosen = [i for i, s in enumerate(stats) if not s.moments and other.is_measured_role(s.key[1])]
        if chosen:
            keys, amax = [stats[i].key for i in chosen], operands.moments.amax[chosen].float()
            scale = other.compute_scales(keys, amax)
            sums = operands.histograms.select(chosen).quantization_sums(scale, other.list_formats(keys))
            tables.append(_table(other, operands, chosen, sums, scale))
            other.update_amax_histories(keys, amax)
    return tables


def _what_if_directly(stats: Sequence[OperandStats], operands: _Operands, others: Sequence[EmulatedScales]) -> list[Rows]:
    tables = []
    for other in others:
        name = other.recipe.name
        if chosen := [i for i, s in enumerate(stats) if name in s.what_if]:
            sums = QuantizationSums.concat([stats[i].what_if[name] for i in chosen])
            scale = other.compute_scales([stats[i].key for i in chosen], operands.moments.amax[chosen].float())
            tables.append(_table(other, operands, chosen, sums, scale))
    return tables


def _table(
    other: EmulatedScales, operands: _Operands, chosen: Sequence[int], sums: QuantizationSums, scale: torch.Tensor
) -> Rows:
    keys = [s.key for s in operands.rows]
    columns = operands.columns(chosen, sums, scale, lambda rows: other.list_formats([keys[i] for i in rows]))
    n = len(columns["layer"])
    return columns | {"recipe": [other.recipe.name] * n, "scale_source": ["what-if"] * n}


def _histograms(stats: Sequence[OperandStats], scale: torch.Tensor) -> Rows:
    """Return the histograms as a table. Bins of infinity and NaN are included, so that each histogram is complete."""
    parts = [
        (stat.key, cast, found if stat.has_single_scale else known, histogram)
        for stat, found in zip(stats, scale.double().tolist(), strict=True)
        for cast, known, histogram in stat.parts
    ]
    return {
        "layer": [layer for (layer, _), *_ in parts],
        "role": [role for (_, role), *_ in parts],
        "recipe": [cast.recipe for _, cast, *_ in parts],
        "format": [cast.format for _, cast, *_ in parts],
        "dtype": [str(histogram.dtype).removeprefix("torch.") for *_, histogram in parts],
        "rounded": [histogram.rounded for *_, histogram in parts],
        "scale": [None if scale != scale else scale for _, _, scale, _ in parts],
        "bins": [histogram.occupied_bins[0].astype(np.uint16) for *_, histogram in parts],
        "counts": [histogram.occupied_bins[1] for *_, histogram in parts],
    }

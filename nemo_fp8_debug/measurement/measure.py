"""From the shards of a sampled step to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.layer_names import fold_of, is_fold
from ..numerics.delayed_state import EmulatedScales
from ..numerics.formats import FORMATS, FloatFormat
from ..numerics.metric_columns import rows
from ..numerics.metrics import Moments, QuantizationSums
from ..numerics.precomputed import Sketches
from ..numerics.recipe import parse_recipe
from ..numerics.tensor_scaling import CurrentScaling
from .expert_groups import Folds
from .operand_stats import Shard, added_up

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Measured:
    """What a sample records of its operands."""

    #: columns of figures
    figures: Columns
    #: columns of sketches
    sketches: Columns
    #: columns of figures under recipes that were not in use
    what_if: Columns
    #: columns of figures of outputs
    outputs: Columns = field(default_factory=dict)

    def and_those_of(self, others: Sequence[Measured]) -> Measured:
        """The rows of all, as of the stages of a pipeline."""

        def joined(parts: Sequence[Columns]) -> Columns:
            filled = [part for part in parts if part]
            return {name: [v for part in filled for v in part[name]] for name in filled[0]} if filled else {}

        every = [self, *others]
        return Measured(
            joined([m.figures for m in every]),
            joined([m.sketches for m in every]),
            joined([m.what_if for m in every]),
            joined([m.outputs for m in every]),
        )


def measure(
    shards: Sequence[Shard], others: Sequence[EmulatedScales] = (), names: Collection[str] = frozenset()
) -> Measured:
    """All figures of operands, and of the experts of each layer as one.

    Args:
        others: recipes to weigh as well; float32 operands, whose sketches are rounded, are left out under delayed and
            current scaling.
        names: of the GEMMs that were looked at; experts that gave no sample are counted in the fold of theirs.
    """
    folds = Folds.of([s.key for s in shards], [(s.cast.recipe, s.cast.format, s.cast.dtype) for s in shards])
    folded = [added_up(key, [shards[i] for i in of]) for key, of in folds.members.items()]
    totals = Sketches([s.sketch for s in shards])
    moments = _moments(shards, totals)
    if folded:
        moments = Moments.concat([moments, _moments(folded, Sketches([s.sketch for s in folded]))])
    experts = Counter(fold for name in {*names, *(s.key[0] for s in shards)} if (fold := fold_of(name)))
    operands = _Operands([*shards, *folded], folds, totals, moments, experts)
    scale, sums = _in_use(shards, operands)
    described: Columns = {
        "recipe": [s.cast.recipe for s in operands.rows],
        "scale_source": [s.cast.source for s in operands.rows],
        "nonfinite_order": [s.nonfinite_order for s in operands.rows],
    }
    formats = [FORMATS[s.cast.format] for s in operands.rows]
    measured = operands.columns(range(len(shards)), sums, scale, lambda rows: [formats[i] for i in rows]) | described
    return Measured(measured, _sketches(shards, scale), _what_if(shards, operands, others))


@dataclass(frozen=True)
class _Operands:
    """What does not depend on scales; a row an operand, and behind them the folds of experts."""

    rows: Sequence[Shard]
    folds: Folds
    #: of operands only
    sketches: Sketches
    moments: Moments
    #: how many experts there are, by fold
    experts: Mapping[str, int]

    def columns(
        self,
        chosen: Sequence[int],
        sums: QuantizationSums,
        scale: torch.Tensor,
        formats: Callable[[Sequence[int]], Sequence[FloatFormat]],
    ) -> Columns:
        """Columns of the operands that are chosen, and of their folds.

        Args:
            sums: of those chosen.
            scale: likewise, float32.
            formats: of rows.
        """
        index, sums, scale = self.folds.behind(chosen, sums, scale, self.moments.amax)
        at = torch.tensor(index, dtype=torch.int64)
        shown = [self.rows[i] for i in index]
        return self._about(shown) | rows(self.moments.rows(at), sums, scale, formats(index))

    def _about(self, shards: Sequence[Shard]) -> Columns:
        return {
            "layer": [s.key[0] for s in shards],
            "gemm": [s.kind for s in shards],
            "role": [s.key[1] for s in shards],
            "dtype": [s.cast.dtype for s in shards],
            "calls": [s.calls for s in shards],
            "shards": [s.shards for s in shards],
            "shards_missing": [s.missing for s in shards],
            "experts": [self._experts(s.key[0]) for s in shards],
        }

    def _experts(self, layer: str) -> int | None:
        return self.experts[layer] if is_fold(layer) else 1 if fold_of(layer) else None


def _in_use(shards: Sequence[Shard], operands: _Operands) -> tuple[torch.Tensor, QuantizationSums]:
    """The scale of each operand, float32 [B], NaN where none is known, and its sums under those that it was cast with."""
    scale = torch.tensor([s.scales[0] if s.scales else torch.nan for s in shards], dtype=torch.float32)
    limits = torch.tensor([FORMATS[s.cast.format].max for s in shards], dtype=torch.float32)
    amax = operands.moments.amax[: len(shards)].float()
    rules = [_rule(s) if s.scales is None else None for s in shards]
    for rule in set(filter(None, rules)):
        scale = torch.where(torch.tensor([r == rule for r in rules]), rule.scale(amax, limits), scale)
    rest = [i for i, s in enumerate(shards) if not s.sums]
    of_sketches = operands.sketches.only(rest).quantization_sums(scale[rest], [FORMATS[shards[i].cast.format] for i in rest])
    summed = {i: s.sums for i, s in enumerate(shards) if s.sums}
    return scale, QuantizationSums.concat([of_sketches, *summed.values()]).rows(_order([*rest, *summed]))


def _order(places: Sequence[int]) -> torch.Tensor:
    """int64 [B]: where each row is, of which it is told where they belong."""
    return torch.tensor(places, dtype=torch.int64).argsort()


def _rule(shard: Shard) -> CurrentScaling | None:
    """The rule that finds a scale from the amax of the whole tensor."""
    rule = parse_recipe(shard.cast.recipe).scaling
    if isinstance(rule, CurrentScaling):
        return rule
    return CurrentScaling() if shard.sums is None else None  # delayed scaling without a history yet


def _moments(shards: Sequence[Shard], totals: Sketches) -> Moments:
    """Moments of each operand: those of its sketch, or the direct ones where the sketch is rounded."""
    of_sketches = totals.moments
    direct = {i: s.moments for i, s in enumerate(shards) if s.moments}
    rest = [i for i in range(len(shards)) if i not in direct]
    rows = Moments.concat([of_sketches.rows(torch.tensor(rest, dtype=torch.int64)), *direct.values()])
    return rows.rows(_order([*rest, *direct])).with_median(of_sketches.median)


def _what_if(shards: Sequence[Shard], operands: _Operands, others: Sequence[EmulatedScales]) -> Columns:
    tables = _weighed_by_sketches(shards, operands, [o for o in others if not o.recipe.in_blocks])
    tables += _weighed_directly(shards, operands, others)
    return {name: [value for table in tables for value in table[name]] for name in tables[0]} if tables else {}


def _weighed_by_sketches(shards: Sequence[Shard], operands: _Operands, others: Sequence[EmulatedScales]) -> list[Columns]:
    chosen = [i for i, s in enumerate(shards) if not s.moments]
    if not chosen or not others:
        return []
    sketches = operands.sketches.only(chosen)
    keys, amax = [shards[i].key for i in chosen], operands.moments.amax[chosen].float()
    tables = []
    for other in others:
        scale = other.of(keys, amax)
        sums = sketches.quantization_sums(scale, other.formats(keys))
        tables.append(_table(other, operands, chosen, sums, scale))
        other.observe(keys, amax)
    return tables


def _weighed_directly(shards: Sequence[Shard], operands: _Operands, others: Sequence[EmulatedScales]) -> list[Columns]:
    tables = []
    for other in others:
        name = other.recipe.name
        if chosen := [i for i, s in enumerate(shards) if name in s.weighed]:
            sums = QuantizationSums.concat([shards[i].weighed[name] for i in chosen])
            scale = other.of([shards[i].key for i in chosen], operands.moments.amax[chosen].float())
            tables.append(_table(other, operands, chosen, sums, scale))
    return tables


def _table(
    other: EmulatedScales, operands: _Operands, chosen: Sequence[int], sums: QuantizationSums, scale: torch.Tensor
) -> Columns:
    keys = [s.key for s in operands.rows]
    columns = operands.columns(chosen, sums, scale, lambda rows: other.formats([keys[i] for i in rows]))
    return columns | _named(other, len(columns["layer"]))


def _named(other: EmulatedScales, n: int) -> Columns:
    return {"recipe": [other.recipe.name] * n, "scale_source": ["what-if"] * n}


def _sketches(shards: Sequence[Shard], scale: torch.Tensor) -> Columns:
    """The sketches as a table; bins of infinity and NaN included, so that a sketch is whole."""
    parts = [
        (shard.key, cast, found if shard.one_scale else known, sketch)
        for shard, found in zip(shards, scale.double().tolist(), strict=True)
        for cast, known, sketch in shard.parts
    ]
    return {
        "layer": [layer for (layer, _), *_ in parts],
        "role": [role for (_, role), *_ in parts],
        "recipe": [cast.recipe for _, cast, *_ in parts],
        "format": [cast.format for _, cast, *_ in parts],
        "dtype": [str(sketch.dtype).removeprefix("torch.") for *_, sketch in parts],
        "rounded": [sketch.rounded for *_, sketch in parts],
        "scale": [None if scale != scale else scale for _, _, scale, _ in parts],
        "bins": [sketch.occupied[0].astype(np.uint16) for *_, sketch in parts],
        "counts": [sketch.occupied[1] for *_, sketch in parts],
    }

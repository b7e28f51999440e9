"""Figures of a recorded run under another recipe: "would current scaling have saved it?".

From its sketches, or from the tensors that it dumped; both give the same figures. Steps are computed in parallel, on this
machine or on a cluster; delayed scales, which follow from step to step, come from the recorded amax beforehand.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch

from ...core.keys import Key
from ...core.layer_names import fold_key, is_fold
from ...errors import ConfigError, RecordError, warn
from ...measurement.expert_groups import Folds
from ...numerics import metrics
from ...numerics.block_scaling import BlockRule
from ...numerics.delayed_state import EmulatedScales
from ...numerics.formats import FORMATS, FloatFormat
from ...numerics.histogram import DTYPES, Sketch, SketchBatch
from ...numerics.metric_columns import in_true_units, rows
from ...numerics.metrics import Moments, QuantizationSums
from ...numerics.recipe import Recipe, parse_recipe, refuse_blocks
from ...numerics.tensor_scaling import CurrentScaling
from ...record.dump import dumped_files, read_dump
from ...record.reader import find_run, read_table
from ...record.schema import SCHEMAS
from ...record.storage import Place
from ...record.writer import add_rows
from .parallel import map_in_parallel

_KEY = ["layer", "role"]
#: what the figures of a step are recomputed from
SOURCES = ("sketches", "dumps")


def replay(
    address: str | os.PathLike[str],
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    source: str = "sketches",
    cluster: str | None = None,
    steps: Collection[int] | None = None,
    only: Collection[Key] | None = None,
) -> pl.DataFrame:
    """Recompute every figure of a run.

    Delayed scaling takes its history from the sampled steps, and the tensor's own amax where it has none yet. Current
    scaling gives all micro-batches of a step one scale, as it does where a run weighs it. Float32 operands
    have rounded sketches, which are left out; their dumps are not. Of a run measured under a block recipe, sketches give
    only the figures that need no scale.

    Args:
        address: the run, or a place above it.
        recipe: as for `parse_recipe`; None: the scales that were in use, which gives the recorded figures again.
        source: "sketches", or "dumps": the tensors that the first rank dumped, which are those that the record is of.
        cluster: see `map_in_parallel`.
        steps: sampled steps to recompute; all by default. Histories take in all of them.
        only: (layer, role) of the operands to recompute, a fold for all of its experts; all by default.

    Returns:
        Rows of the `figures` table. A file that cannot be read is named in a warning and left out.

    Raises:
        RecordError: there is no record.
        ConfigError: the recipe or the cluster cannot be used.
    """
    run = find_run(address)
    wanted = None if recipe is None else parse_recipe(recipe)
    if wanted and source == "sketches":
        refuse_blocks(wanted, "replay from sketches, which know nothing of blocks (dumps do),")
    recorded = _rows_of(read_table(run, "figures"), only)
    multipliers = dict(read_table(run, "steps", ["step", "grad_multiplier"]).iter_rows())
    jobs = [
        _Job(str(run), source, wanted, int(step[0]), about, scales, multipliers.get(step[0]), only)
        for (step, about), scales in zip(
            recorded.group_by("step", maintain_order=True), _scales(recorded, wanted), strict=True
        )
        if steps is None or step[0] in steps
    ]
    if source == "dumps":
        there = {(attempt, step) for attempt, step, rank, _ in dumped_files(run) if rank == 0}
        jobs = [job for job in jobs if (job.about["attempt"][0], job.step) in there]
    frames = map_in_parallel(_replay_step, jobs, cluster)
    return pl.concat([pl.DataFrame(schema=SCHEMAS["figures"]), *frames])


def _rows_of(recorded: pl.DataFrame, only: Collection[Key] | None) -> pl.DataFrame:
    if only is None:
        return recorded
    keys = recorded.select(_KEY).unique(maintain_order=True)
    kept = pl.Series([key in only or fold_key(*key) in only for key in keys.rows()], dtype=pl.Boolean)
    return recorded.join(keys.filter(kept), on=_KEY, how="semi", maintain_order="left")


def _scales(recorded: pl.DataFrame, recipe: Recipe | None) -> list[dict[Key, torch.Tensor | CurrentScaling | BlockRule]]:
    """For each sampled step what a recipe would have cast each operand with."""
    if recipe is None:
        return [{} for _ in range(recorded["step"].n_unique())]
    recorded = recorded.filter(~pl.col("layer").map_elements(is_fold, pl.Boolean))
    emulated = EmulatedScales(recipe, recorded.select(_KEY).unique(maintain_order=True).rows())
    found = []
    for _, about in recorded.group_by("step", maintain_order=True):
        keys = about.select(_KEY).rows()
        found.append({key: emulated.next_for(key) for key in keys})
        emulated.observe(keys, torch.tensor(about["amax"].fill_null(0).to_list(), dtype=torch.float32))
    return found


@dataclass(frozen=True)
class _Job:
    """One step, with all that a process elsewhere needs to recompute it."""

    run: str
    source: str
    #: None: the recorded scales
    recipe: Recipe | None
    step: int
    #: the step's recorded rows
    about: pl.DataFrame
    scales: Mapping[Key, torch.Tensor | CurrentScaling | BlockRule]
    #: of dY in that step
    multiplier: float | None
    #: operands to recompute; None: all
    only: Collection[Key] | None

    def wants(self, key: Key) -> bool:
        """Whether an operand is to be recomputed."""
        return self.only is None or key in self.only or fold_key(*key) in self.only


@dataclass(frozen=True)
class _Part:
    """Calls of an operand that were cast with one scale: their sketch, or the tensor itself where a sketch is not enough."""

    key: Key
    values: Sketch | torch.Tensor
    recipe: str
    format: FloatFormat
    #: NaN where blocks had scales of their own
    scale: float


@dataclass(frozen=True)
class _Found:
    """Operands that were recomputed."""

    keys: list[Key]
    recipes: list[str]
    #: of all calls together; None of float32 operands
    totals: list[Sketch | None]
    moments: Moments
    sums: QuantizationSums
    #: float32 [B], the smallest of those that calls were cast with
    scale: torch.Tensor
    formats: list[FloatFormat]

    @classmethod
    def concat(cls, parts: Sequence[_Found]) -> _Found:
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

    def with_folds(self, recorded: Collection[Key]) -> _Found:
        """The same, and behind them the recorded folds of experts that were all recomputed."""
        experts: dict[Key, list[Key]] = defaultdict(list)
        for layer, role in recorded:
            if fold := fold_key(layer, role):
                experts[fold].append((layer, role))
        place = {key: i for i, key in enumerate(self.keys)}
        folds = [key for key, mine in experts.items() if key in recorded and all(expert in place for expert in mine)]
        members = {key: [place[expert] for expert in experts[key]] for key in folds}
        _, sums, scale = Folds(members, len(self.keys)).behind(
            range(len(self.keys)), self.sums, self.scale, self.moments.amax
        )
        firsts = [rows[0] for rows in members.values()]
        totals = [_added_up([self.totals[i] for i in rows]) for rows in members.values()]
        moments = [
            metrics.merge(self.moments.rows(torch.tensor(rows)))
            if total is None
            else metrics.moments(SketchBatch.of([total]))
            for rows, total in zip(members.values(), totals, strict=True)
        ]
        return _Found(
            self.keys + folds,
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
        }
        return about | rows(self.moments, self.sums, self.scale, self.formats)


def _added_up(sketches: Sequence[Sketch | None]) -> Sketch | None:
    known = [sketch for sketch in sketches if sketch is not None]
    return Sketch.total(known) if len(known) == len(sketches) else None


def _replay_step(job: _Job) -> pl.DataFrame:
    run = Place(job.run)
    parts = _sketched(run, job) if job.source == "sketches" else _dumped(run, job)
    sketched = [part for part in parts if isinstance(part.values, Sketch)]
    found = [_of_sketches(sketched, job)] if sketched else []
    found += [_of_tensors(group, job) for group in _by_key(p for p in parts if isinstance(p.values, torch.Tensor))]
    if not found:
        return pl.DataFrame(schema=SCHEMAS["figures"])
    return _as_rows(job, _Found.concat(found).with_folds(dict.fromkeys(job.about.select(_KEY).rows())).columns())


def _sketched(run: Place, job: _Job) -> list[_Part]:
    table = read_table(run, "sketches", where={"step": job.step, "rounded": False})
    names = ("layer", "role", "dtype", "bins", "counts", "recipe", "format", "scale")
    table = table.join(job.about.select(_KEY), on=_KEY, how="semi", maintain_order="left")
    parts = []
    for layer, role, dtype, bins, counts, *rest in table.select(names).iter_rows():
        sketch = Sketch(getattr(torch, dtype))
        sketch.counts[torch.tensor(bins, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)
        parts.append(_Part((layer, role), sketch, rest[0], FORMATS[rest[1]], math.nan if rest[2] is None else rest[2]))
    return parts


def _dumped(run: Place, job: _Job) -> list[_Part]:
    from ...kernels import sketch  # compiles on import, which sketches do not need

    parts: dict[tuple[Key, int], _Part] = {}
    in_blocks = _in_blocks(job)
    recorded = {
        (layer, role): math.nan if s is None else s for layer, role, s in job.about.select(*_KEY, "scale").iter_rows()
    }
    for attempt, step, rank, name in dumped_files(run):
        if (attempt, step, rank) != (job.about["attempt"][0], job.step, 0):
            continue
        try:
            about, tensors = read_dump(run, name)
        except (OSError, ValueError) as error:
            warn(f"{run.path(name)} is left out, it cannot be read: {error}")
            continue
        key, x, scale = (about.layer, about.role), tensors["value"], float(tensors["scale"])
        if not job.wants(key):
            continue
        if recipe := in_blocks.get(key):
            part = _Part(key, x, recipe.name, recipe.format_of(about.role), math.nan)
        else:
            part = _Part(key, sketch(x) if x.dtype in DTYPES else x, about.recipe, about.format, scale)
        if about.scale_source != "engine" and isinstance(part.values, Sketch):
            part = replace(part, scale=recorded.get(key, scale))
        # Calls under one scale are one sketch, as in the record.
        apart = about.scale_source == "engine" and about.recipe.startswith("current")
        group = key, about.call if apart or isinstance(part.values, torch.Tensor) else -1
        parts[group] = _together(parts[group], part) if group in parts else part
    return list(parts.values())


def _in_blocks(job: _Job) -> dict[Key, Recipe]:
    """The block recipes that operands are to be measured under."""
    found = {}
    for layer, role, name in job.about.select(*_KEY, "recipe").iter_rows():
        with contextlib.suppress(ConfigError):  # a host may have recipes that have no name here
            recipe = job.recipe or parse_recipe(name)
            if recipe.in_blocks:
                found[layer, role] = recipe
    return found


def _together(first: _Part, second: _Part) -> _Part:
    assert isinstance(first.values, Sketch) and isinstance(second.values, Sketch)
    return replace(first, values=first.values + second.values)


def _by_key(parts: Any) -> list[list[_Part]]:
    groups: dict[Key, list[_Part]] = defaultdict(list)
    for part in parts:
        groups[part.key].append(part)
    return list(groups.values())


def _of_sketches(parts: Sequence[_Part], job: _Job) -> _Found:
    groups = _by_key(parts)
    if job.recipe is not None:  # one scale for all calls
        groups = [[replace(g[0], values=sum((p.values for p in g[1:]), g[0].values))] for g in groups]
    ordered, n = [part for group in groups for part in group], len(groups)
    owner = torch.from_numpy(np.repeat(np.arange(n), [len(group) for group in groups]))
    batch = SketchBatch.of([part.values for part in ordered])  # type: ignore[misc]
    totals: list[Any] = [sum((p.values for p in g[1:]), g[0].values) for g in groups]
    scale, formats = _casts(ordered, batch.amax(), job)
    return _Found(
        [group[0].key for group in groups],
        [_recipe_of(group[0], job) for group in groups],
        totals,
        metrics.moments(SketchBatch.of(totals)),
        metrics.quantization_sums(batch, scale, formats).fold(owner, n),
        torch.full((n,), torch.inf).scatter_reduce_(0, owner, scale, "amin"),
        list(dict(zip(owner.tolist(), formats, strict=True)).values()),
    )


def _of_tensors(parts: Sequence[_Part], job: _Job) -> _Found:
    """One operand, measured directly: of float32, or under a block recipe."""
    from ...kernels import quantization_sums

    tensors: list[torch.Tensor] = [part.values for part in parts]  # type: ignore[misc]
    recipe, role = _in_blocks(job).get(parts[0].key), parts[0].key[1]
    each, whole, total = _moments(tensors)
    amax = each.amax if job.recipe is None else whole.amax.expand(len(parts))
    scale, formats = _casts(parts, amax.float(), job)
    casts = [recipe.scaling] * len(parts) if recipe else scale
    sums = QuantizationSums.concat(
        [quantization_sums(x, by, role, fmt) for x, by, fmt in zip(tensors, casts, formats, strict=True)]
    )
    recipes = [_recipe_of(parts[0], job)]
    return _Found([parts[0].key], recipes, [total], whole, sums.total(), scale.amin()[None], formats[:1])


def _recipe_of(part: _Part, job: _Job) -> str:
    return job.recipe.name if job.recipe else part.recipe


def _moments(tensors: Sequence[torch.Tensor]) -> tuple[Moments, Moments, Sketch | None]:
    """Moments of each tensor, those of all of them as one, and the sketch of these, where it is exact."""
    from ...kernels import sketch

    if tensors[0].dtype in DTYPES:
        first, *rest = sketches = [sketch(x) for x in tensors]
        total = sum(rest, first)
        return metrics.moments(SketchBatch.of(sketches)), metrics.moments(SketchBatch.of([total])), total
    each = Moments.concat([metrics.moments_of_float32(x) for x in tensors])
    return each, metrics.merge(each), None


def _casts(parts: Sequence[_Part], amax: torch.Tensor, job: _Job) -> tuple[torch.Tensor, list[FloatFormat]]:
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


def _as_rows(job: _Job, columns: dict[str, list[Any]]) -> pl.DataFrame:
    """Rows of the `figures` table; what does not depend on the recipe is taken from the recorded ones."""
    schema = SCHEMAS["figures"]
    columns |= in_true_units(columns, job.multiplier)
    measured = pl.DataFrame({name: pl.Series(values, dtype=schema[name]) for name, values in columns.items()})
    kept = [name for name in schema if name not in columns or name in _KEY]
    known = job.about.select(kept)
    if job.recipe is not None:
        known = known.with_columns(scale_source=pl.lit("what-if"))
    return measured.join(known, on=_KEY, how="left", maintain_order="left").select(list(schema))


def add_to_record(address: str | os.PathLike[str], replayed: pl.DataFrame) -> None:
    """Keep replayed rows in the record, in its table `replayed`.

    Raises:
        RecordError: there is no record, or it cannot be written.
    """
    run = find_run(address)
    try:
        add_rows(run, "replayed", replayed)
    except Exception as error:  # every driver of a remote file system has errors of its own
        raise RecordError(f"the record at {run} cannot be written: {error}") from None

"""Learn bands from healthy runs, and check other runs by them. A band is the usual range of a metric for one kind of
operand.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from ...core.keys import ROLES
from ...core.layer_names import find_expert_aggregate, is_expert_aggregate
from ...errors import RecordError
from ..comparison.drift import add_kind_and_depth_columns
from ..comparison.layer_matching import read_weight_sizes
from ..comparison.onset import EVIDENCE, IN_A_ROW, OF_GRADIENTS, OnsetCriterion
from ..runs.blocks import Result, map_grid_slices, map_tensor_chunks
from ..runs.grid import Floats, MetricGrid
from ..runs.run import Run
from ..runs.settings import find_usual_casts
from ..runs.source import Bools

#: patterns of GEMM names by purpose. If a name occurs in both attention and MLP, the name of the enclosing module decides
_NAMES = {
    "attention in": r"(linear_)?(qkv|q|k|v|query|key|value|query_key_value)(_proj)?|c_attn|in_proj|wqkv|w[qkv]",
    "attention out": r"(linear_)?(o|out)_proj|linear_proj|wo",
    "mlp in": r"(linear_)?fc1|(gate|up|gate_up)_proj|w1|w3|c_fc|dense_h_to_4h",
    "mlp out": r"(linear_)?fc2|down_proj|w2|dense_4h_to_h",
    "router": r"gate|router",
    "output": r"lm_head|output_layer|classifier|score|output",
}
_ATTENTION, _MLP = (
    re.compile(r"attn|attention", re.IGNORECASE),
    re.compile(r"mlp|feed_forward|ffn|intermediate", re.IGNORECASE),
)


@functools.lru_cache(maxsize=1 << 16)
def purpose_of(layer: str) -> str | None:
    """Return the purpose of a GEMM, or None if its name does not show the purpose.

    >>> purpose_of("decoder.layers.3.self_attention.linear_qkv"), purpose_of("model.layers.0.mlp.experts.5.w2")
    ('attention in', 'expert mlp out')
    >>> purpose_of("encoder.layer.0.attention.output.dense"), purpose_of("encoder.layer.0.intermediate.dense")
    ('attention out', 'mlp in')
    >>> purpose_of("adapter.7") is None
    True
    """
    parts = [part for part in layer.split(".") if not part.isdigit() and part != "*"]
    if not parts:
        return None
    last, before = parts[-1].lower(), ".".join(parts[:-1])
    found = next((purpose for purpose, names in _NAMES.items() if re.fullmatch(names, last)), None)
    if last in ("dense", "c_proj", "proj"):
        in_attention = _ATTENTION.search(before) or (last == "proj" and not _MLP.search(before))
        found = "mlp in" if before.endswith("intermediate") else "attention out" if in_attention else "mlp out"
    expert = is_expert_aggregate(layer) or find_expert_aggregate(layer) is not None
    return f"expert {found}" if found and expert else found


VERSION = 1
SHIPPED = Path(__file__).with_name("healthy.parquet")
#: least number of runs from which a band is learned
FEWEST = 6
#: a band applies to weights with at most this many times fewer or more values than in the learned runs
_SIZES = 4
#: number of samples at the start of a run that we ignore, because scales may still have initial values
_FIRST = 2
#: an outlier counts only if at least this percentage of values underflows or overflows
_COSTS = 0.5
#: an operand is beyond its band if it exceeds the largest lasting value by more than this multiple of the least rise that
#: counts
_BEYOND = 1.5
_METADATA = b"nemo_fp8_debug.bands"
#: largest size in bytes of a band file that we read
_MOST_BYTES = 64 << 20
#: columns that identify a band
_KIND = ("purpose", "role", "recipe", "part", "phase", "metric")
_BY = (*_KIND, "sign")
_SCHEMA: Mapping[str, Any] = {
    **dict.fromkeys(_KIND, pl.String),
    "sign": pl.Int32,
    **dict.fromkeys(("median", "lasting"), pl.Float64),
    **dict.fromkeys(("smallest", "largest", "runs"), pl.Int64),
}
#: columns of the summary of one run
_COURSE = {name: _SCHEMA[name] for name in (*_BY, "median", "lasting")} | {"n": pl.Int64}

#: metrics that have a band, with one entry for each direction that counts (rise or fall)
JUDGED = tuple(evidence for evidence in EVIDENCE if evidence.metric != "nonfinite")


@dataclass(frozen=True)
class HealthyBands:
    """Bands of healthy runs."""

    #: one row for each kind of operand and each metric. In addition to columns for the kind, the columns are median, lasting
    #: (largest value that lasted for three samples), runs (number of runs), smallest and largest (smallest and largest
    #: number of values of W). Median and lasting are scaled so that higher is worse
    table: pl.DataFrame
    #: model classes of the runs
    families: Sequence[str]
    #: number of runs
    runs: int

    @classmethod
    def learn(cls, runs: Iterable[Run]) -> HealthyBands:
        """Learn bands from healthy runs.

        Raises:
            RecordError: `runs` is empty.
        """
        courses = [(_course(run), family_of(run)) for run in runs]
        if not courses:
            raise RecordError("no runs to learn from: give at least one record of a healthy run")
        tables, families = zip(*courses, strict=True)
        bands, n = pl.concat(tables).group_by(*_BY, maintain_order=True), pl.col("n")
        sizes = {"smallest": n.min(), "largest": n.max(), "runs": pl.len()}
        table = bands.agg(pl.col("median").median(), pl.col("lasting").max(), **sizes).sort(*_BY)
        return cls(table, sorted(set(families)), len(tables))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HealthyBands:
        """Read bands from a file that `write` wrote.

        Raises:
            RecordError: the file is missing or contains no bands.
        """
        try:
            if os.path.getsize(path) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
            table = pq.read_table(path)
            told = json.loads((table.schema.metadata or {})[_METADATA])
            if told["version"] != VERSION:
                raise ValueError(f"its version is {told['version']}, but this release reads version {VERSION}")
            frame = pl.DataFrame(pl.from_arrow(table))
            return cls(_in_file(frame), list(map(str, told["families"])), int(told["runs"]))
        except FileNotFoundError:
            raise RecordError(f"there is no file {os.fspath(path)}") from None
        except Exception as error:  # on a foreign file, the reader may raise any error
            raise RecordError(f"{os.fspath(path)} contains no bands of healthy runs: {error}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the bands to a file."""
        table = _in_file(self.table).to_arrow(compat_level=pl.CompatLevel.oldest())
        told = {"version": VERSION, "families": list(self.families), "runs": self.runs}
        pq.write_table(table.replace_schema_metadata({_METADATA: json.dumps(told).encode()}), path, compression="zstd")

    def look_up_bands(self, tensors: pl.DataFrame, evidence: OnsetCriterion, phase: str) -> tuple[Floats, Floats]:
        """Return the columns median and lasting of each tensor's band, in the order of `tensors`.

        Values are NaN if the band was learned from too few runs, or only from weights of a very different size.
        """
        rows = self.table.filter(pl.col("runs") >= FEWEST, metric=evidence.metric, sign=evidence.sign, phase=phase)
        joined = tensors.join(rows, on=["purpose", "role", "recipe", "part"], how="left", maintain_order="left")
        fits = pl.col("n").is_between(pl.col("smallest") / _SIZES, pl.col("largest") * _SIZES)
        # Files of earlier releases also contain values below `good`.
        known = (pl.when(fits).then(pl.col(name).clip(lower_bound=evidence.good)) for name in ("median", "lasting"))
        median, most = joined.select(known).fill_null(np.nan).to_numpy().T
        return median, most


def _in_file(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(pl.col(name).cast(kind) for name, kind in _SCHEMA.items())


@functools.cache
def shipped() -> HealthyBands | None:
    """Return the bands shipped with the package, learned from tiny models, or None if the file is missing."""
    return HealthyBands.read(SHIPPED) if SHIPPED.exists() else None


def choose_bands(run: Run, given: str | os.PathLike[str] | HealthyBands | None) -> HealthyBands | None:
    """Return the bands for checking a run, or None if the shipped bands do not cover this class of model.

    Args:
        given: bands from the user, which apply to any model. None: the shipped bands.

    Raises:
        RecordError: the given file is missing or contains no bands.
    """
    if given is not None:
        return given if isinstance(given, HealthyBands) else HealthyBands.read(given)
    found = shipped()
    return found if found is not None and family_of(run) in found.families else None


def family_of(run: Run) -> str:
    """Return the class of a run's model, or an empty string if the record does not contain the class."""
    model = run.fingerprint.get("model")
    return str(model.get("class", "")) if isinstance(model, Mapping) else ""


@dataclass(frozen=True)
class _Operands:
    """A part of a run's operands, without the first samples. All of them belong to GEMMs with a known purpose."""

    grid: MetricGrid
    #: one row for each operand, in the order of the grid: layer, role, purpose, recipe, part, n (number of values of W)
    tensors: pl.DataFrame
    #: for each phase, which samples belong to it, bool [S]. The phase is `warm-up` until the learning rate reaches its
    #: maximum, then `later`
    phases: Mapping[str, Bools]

    def courses(self) -> Iterator[tuple[OnsetCriterion, str, Bools, Floats]]:
        """For each metric and phase, yield metric, phase, samples in this phase (bool [S]) and values in these samples.
        Values are scaled so that higher is worse.
        """
        for evidence in JUDGED:
            values = evidence.convert_to_severity_scale(self.grid.read_metric(evidence.metric))
            for phase, samples in self.phases.items():
                yield evidence, phase, samples, values[:, samples]


def _over_operands(run: Run, do: Callable[[_Operands], Result]) -> list[Result]:
    """Apply `do` to one part of the operands after another, and return the results in order."""
    metrics = run.metrics.select_roles(*ROLES)
    recipes = find_usual_casts(metrics).select("layer", "role", "recipe")
    sizes = {layer: n for layer, n in read_weight_sizes(metrics).items() if n}
    known = add_kind_and_depth_columns(recipes).with_columns(
        purpose=pl.Series(map(purpose_of, recipes["layer"]), dtype=pl.String),
        n=pl.Series(map(sizes.get, recipes["layer"]), dtype=pl.Int64),
    )
    known = known.drop_nulls(["purpose", "recipe", "n"])
    depth = pl.col("depth")
    within = pl.when(depth == 0).then(pl.lit("first")).when(depth == depth.max()).then(pl.lit("last"))
    part = pl.when(depth.is_null()).then(pl.lit("outside")).otherwise(within.otherwise(pl.lit("middle")))
    known = known.select("layer", "role", "purpose", "recipe", "n", part=part)
    do_part = partial(_do_part, do, known, _find_warmed_up(run))
    needed = dict.fromkeys([*(evidence.metric for evidence in JUDGED), "underflow_pct", "overflow_pct"])
    found = map_tensor_chunks(
        partial(map_grid_slices, do_part), metrics.select_tensors_by_key(known), together=[list(needed)]
    )
    return [of_part for of_block in found for of_part in of_block]


def _do_part(do: Callable[[_Operands], Result], kinds: pl.DataFrame, warmed_up: float, grid: MetricGrid) -> Result:
    grid = grid.select_samples(np.arange(min(_FIRST, len(grid.steps)), len(grid.steps)))
    tensors = grid.tensors.join(kinds, on=["layer", "role"], how="left", maintain_order="left")
    warming_up = grid.steps < warmed_up
    return do(_Operands(grid, tensors, {"warm-up": warming_up, "later": ~warming_up}))


def _find_warmed_up(run: Run) -> float:
    """Return the first step with the highest learning rate. If no rate is recorded, return the step after a tenth of the
    run.
    """
    rates = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().sort("step")
    if rates.is_empty():
        steps = run.metrics.steps
        return float(steps[len(steps) // 10]) if len(steps) else 0.0
    return float(rates["step"][int(rates["lr"].arg_max() or 0)])


def _find_lasting(values: Floats) -> Floats:
    """For each sample, return the minimum of its and the next two values, [T, S]; -inf if one of the three is missing."""
    padded = np.pad(np.nan_to_num(values, nan=-np.inf), ((0, 0), (0, IN_A_ROW - 1)), constant_values=-np.inf)
    least: Floats = np.lib.stride_tricks.sliding_window_view(padded, IN_A_ROW, axis=1).min(-1)
    return least


def _course(run: Run) -> pl.DataFrame:
    """Return the summary of a run, one row for each kind of operand and metric."""
    tables = [table for of_part in _over_operands(run, _courses) for table in of_part]
    kinds = pl.concat([pl.DataFrame(schema=_COURSE), *tables]).group_by(*_BY, maintain_order=True)
    return kinds.agg(pl.col("n").max(), pl.col("median").median(), pl.col("lasting").max())


def _courses(operands: _Operands) -> list[pl.DataFrame]:
    """Return a table for each metric and phase, one row for each operand."""
    tables = []
    for evidence, phase, _, values in operands.courses():
        if not values.size:
            continue
        known = np.isfinite(values).any(axis=1)
        here = values[known]
        rows = operands.tensors.filter(known).with_columns(
            phase=pl.lit(phase),
            metric=pl.lit(evidence.metric),
            sign=pl.lit(evidence.sign, pl.Int32),
            median=pl.Series(np.nanmedian(here, axis=1), dtype=pl.Float64),
            lasting=pl.Series(_find_lasting(here).max(axis=1), dtype=pl.Float64),
        )
        tables.append(rows.select(*_COURSE))
    return tables


@dataclass(frozen=True)
class JudgedRun:
    """The result of checking a run by bands."""

    #: operands beyond their band, earliest onset first. The columns are layer, role, onset (step) and excess (multiple of
    #: the least rise that counts)
    beyond: pl.DataFrame
    #: layer and role of operands that have a band
    covered: pl.DataFrame
    #: number of all operands
    operands: int
    #: number of runs from which the bands were learned
    runs: int

    @property
    def is_mostly_covered(self) -> bool:
        """Return True if at least nine in ten operands have a band."""
        return len(self.covered) >= 0.9 * self.operands > 0


def describe_band_check(judged: JudgedRun | None) -> str:
    """Describe in a sentence how a run without a baseline was checked."""
    if judged is None:
        known = "no bands were learned from healthy runs of this class of model"
    elif not len(judged.covered):
        known = "no bands were learned for operands with these recipes and sizes"
    else:
        return (
            f"Bands of {judged.runs} healthy runs replace the baseline for {len(judged.covered)} of {judged.operands} "
            "operands. They give medium confidence at most."
        )
    return (
        f"We check operands in FP8 by fixed limits, and do not check other operands, because {known}. To learn bands from "
        "your own runs, use `nemo-fp8-debug learn`."
    )


def judge_by_bands(run: Run, bands: HealthyBands) -> JudgedRun:
    """Check a run's operands by bands.

    The largest lasting value is the largest value that lasted for three samples in healthy runs. An operand is beyond its
    band if it exceeds this value for three samples. The excess must be more than 1.5 times the distance from the healthy
    median to this value, or 1.5 times the metric's least rise if that is larger. Fixed limits detect shorter spikes.
    """
    judged = pl.concat(_over_operands(run, partial(_judge, bands)))
    key = ["layer", "role"]
    beyond = judged.filter(pl.col("excess") > 0).select(*key, "onset", "excess")
    beyond = beyond.sort("onset", -pl.col("excess"), maintain_order=True)
    return JudgedRun(beyond, judged.filter("covered").select(key), len(run.metrics.tensors), bands.runs)


def _judge(bands: HealthyBands, operands: _Operands) -> pl.DataFrame:
    """Return the operands with columns onset, excess (0 within the band) and covered (whether a band exists)."""
    grid, tensors = operands.grid, operands.tensors
    lost = np.fmax(grid.read_metric("underflow_pct"), grid.read_metric("overflow_pct"))
    covered = np.zeros(len(tensors), dtype=bool)
    onset, excess = np.full(len(tensors), np.iinfo(np.int64).max), np.zeros(len(tensors))
    least = np.where(tensors["role"].to_numpy() == "grad_output", OF_GRADIENTS, 1.0)
    for evidence, phase, samples, values in operands.courses():
        if evidence.metric == "outlier_log2":  # an outlier is harmless without underflow or overflow
            values = np.where(lost[:, samples] > _COSTS, values, np.nan)
        median, most = bands.look_up_bands(tensors, evidence, phase)
        covered |= ~np.isnan(most) & (phase == "later")
        if not samples.any():
            continue
        with np.errstate(invalid="ignore"):
            rise = np.fmax(least * evidence.compute_least_rise_above(median), most - median)
            strength = np.nan_to_num((_find_lasting(values) - most[:, None]) / rise[:, None], nan=0.0)
        out = np.flatnonzero((strength > _BEYOND).any(axis=1))
        first = np.argmax(strength[out] > _BEYOND, axis=1)
        onset[out] = np.minimum(onset[out], grid.steps[samples][first])
        excess[out] = np.maximum(excess[out], strength[out, first])
    return tensors.select("layer", "role", onset=pl.Series(onset), excess=pl.Series(excess), covered=pl.Series(covered))

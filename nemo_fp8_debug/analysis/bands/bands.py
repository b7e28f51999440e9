"""Bands of healthy runs: how far operands of a kind go, learned from many runs and kept in a file."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.parquet as pq

from ...core.keys import ROLES
from ...core.layer_names import aggregate_of, is_aggregate
from ...errors import RecordError
from ..comparison.drift import placed
from ..comparison.layer_matching import sizes_of_weights
from ..comparison.onset import EVIDENCE, IN_A_ROW, OF_GRADIENTS, Evidence
from ..runs.blocks import Result, in_parts, over_blocks
from ..runs.grid import Floats, Grid
from ..runs.metrics import Metrics
from ..runs.run import Run
from ..runs.settings import usual_casts

#: by purpose, names of GEMMs; those that both attention and MLP have are told apart by what they lie in
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
    """Return what a GEMM is for; None: its name does not say.

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
        found = (
            "mlp in" if before.endswith("intermediate") else "mlp out" if not _ATTENTION.search(before) else "attention out"
        )
        found = "attention out" if found == "mlp out" and last == "proj" and not _MLP.search(before) else found
    expert = is_aggregate(layer) or aggregate_of(layer) is not None
    return f"expert {found}" if found and expert else found


VERSION = 1
SHIPPED = Path(__file__).with_name("healthy.parquet")
#: runs that a band is made of, at least
FEWEST = 6
#: how many times smaller or larger a weight may be than those that a band was learned from
_SIZES = 4
#: samples at the beginning, whose scales are made up
_FIRST = 2
_KIND = ["purpose", "role", "recipe", "part", "phase"]
_METADATA = b"nemo_fp8_debug.bands"
#: bytes of a file, at most
_MOST_BYTES = 64 << 20

#: metrics that have a band, each a direction
JUDGED = tuple(evidence for evidence in EVIDENCE if evidence.metric != "nonfinite")


@dataclass(frozen=True)
class Bands:
    """What healthy runs do."""

    #: a row a kind of operand and metric: _KIND, metric, sign, median and lasting (largest that lasted for three
    #: samples), each scaled so that more is worse; runs, smallest and largest (values of W)
    table: pl.DataFrame
    #: model classes that they were learned from
    families: Sequence[str]
    #: runs, in all
    runs: int

    @classmethod
    def learn(cls, runs: Iterable[Run]) -> Bands:
        """From runs that went well.

        Raises:
            RecordError: there is none.
        """
        tables, families = list[pl.DataFrame](), list[str]()
        for run in runs:
            tables.append(_course(run))
            families.append(family_of(run))
        if not tables:
            raise RecordError("there are no runs to learn from")
        rows = pl.concat(tables)
        bands = rows.group_by(*_KIND, "metric", "sign", maintain_order=True).agg(
            pl.col("median").median(),
            pl.col("lasting").max(),
            pl.col("n").min().alias("smallest"),
            pl.col("n").max().alias("largest"),
            pl.len().alias("runs"),
        )
        return cls(bands.sort(*_KIND, "metric", "sign"), sorted(set(families)), len(tables))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Bands:
        """From a file that `write` has made.

        Raises:
            RecordError: it is none.
        """
        try:
            if os.path.getsize(path) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
            table = pq.read_table(path)
            told = json.loads((table.schema.metadata or {})[_METADATA])
            if told["version"] != VERSION:
                raise ValueError(f"it has version {told['version']}, and this release reads {VERSION}")
            frame = pl.from_arrow(table)
            assert isinstance(frame, pl.DataFrame)
            return cls(
                frame.select(pl.col(name).cast(kind) for name, kind in _SCHEMA.items()),
                list(map(str, told["families"])),
                int(told["runs"]),
            )
        except FileNotFoundError:
            raise RecordError(f"there is no file {os.fspath(path)}") from None
        except Exception as error:  # whatever a foreign file makes a reader raise
            raise RecordError(f"{os.fspath(path)} holds no bands of healthy runs: {error}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """To a file."""
        table = self.table.select(pl.col(name).cast(kind) for name, kind in _SCHEMA.items()).to_arrow(
            compat_level=pl.CompatLevel.oldest()
        )
        told = {"version": VERSION, "families": list(self.families), "runs": self.runs}
        pq.write_table(table.replace_schema_metadata({_METADATA: json.dumps(told).encode()}), path, compression="zstd")

    def knows(self, run: Run) -> bool:
        """Whether they were learned from models of this class."""
        return family_of(run) in self.families

    def of(self, tensors: pl.DataFrame, evidence: Evidence, phase: str) -> pl.DataFrame:
        """`tensors` in their order with the median and lasting of their bands; null where they have none that was
        learned from enough runs with weights of such a size."""
        rows = self.table.filter(metric=evidence.metric, sign=evidence.sign, phase=phase).filter(pl.col("runs") >= FEWEST)
        joined = tensors.join(rows, on=["purpose", "role", "recipe", "part"], how="left", maintain_order="left")
        fits = pl.col("n").is_between(pl.col("smallest") / _SIZES, pl.col("largest") * _SIZES)
        # Files of earlier releases hold values below that, too.
        known = (pl.col(name).clip(lower_bound=evidence.good) for name in ("median", "lasting"))
        return joined.select(pl.when(fits).then(each) for each in known)


_SCHEMA: Mapping[str, Any] = {
    **dict.fromkeys(_KIND, pl.String),
    "metric": pl.String,
    "sign": pl.Int32,
    **dict.fromkeys(("median", "lasting"), pl.Float64),
    **dict.fromkeys(("smallest", "largest", "runs"), pl.Int64),
}


@cache
def shipped() -> Bands | None:
    """Those that come with the package, learned from tiny models; None where the file is missing."""
    return Bands.read(SHIPPED) if SHIPPED.exists() else None


def bands_for(run: Run, given: str | os.PathLike[str] | Bands | None) -> Bands | None:
    """The bands to judge a run by; None where those that come with the package know no such model.

    Args:
        given: by the user, who says by this that they fit; None: those that come with the package.

    Raises:
        RecordError: the file that was given holds none.
    """
    if given is not None:
        return given if isinstance(given, Bands) else Bands.read(given)
    found = shipped()
    return found if found is not None and found.knows(run) else None


def family_of(run: Run) -> str:
    """The class of a run's model; empty where the record does not tell."""
    model = run.fingerprint.get("model")
    return str(model.get("class", "")) if isinstance(model, Mapping) else ""


@dataclass(frozen=True)
class Kinds:
    """The operands of a run and what kind each is of."""

    metrics: Metrics
    #: a row an operand of `metrics`: layer, role, purpose, recipe, part, n (values of W)
    tensors: pl.DataFrame
    #: step from which the learning rate has been at its highest
    warmed_up: float

    @classmethod
    def of(cls, run: Run) -> Kinds:
        """Of the operands whose GEMM tells what it is for."""
        metrics = run.metrics.with_role(*ROLES)
        recipes = usual_casts(metrics).select("layer", "role", "recipe")
        sizes = {layer: n for layer, n in sizes_of_weights(metrics).items() if n}
        known = placed(recipes).with_columns(
            purpose=pl.Series([purpose_of(layer) for layer in recipes["layer"]], dtype=pl.String),
            n=pl.Series([sizes.get(layer) for layer in recipes["layer"]], dtype=pl.Int64),
        )
        known = known.drop_nulls(["purpose", "recipe", "n"]).select("layer", "role", "purpose", "recipe", "depth", "n")
        deepest = known["depth"].max()
        last = int(deepest) if isinstance(deepest, int) else 0
        known = known.with_columns(part=_part(last)).drop("depth")
        return cls(metrics.within(known), known, _warmed_up(run))

    def parts(self, do: Callable[[OfKinds], Result]) -> list[Result]:
        """`do` of some operands at a time, in order."""
        needed = dict.fromkeys([*(evidence.metric for evidence in JUDGED), "underflow_pct", "overflow_pct"])
        found = over_blocks(partial(in_parts, partial(self._part, do)), self.metrics, together=[list(needed)])
        return [of_part for of_block in found for of_part in of_block]

    def _part(self, do: Callable[[OfKinds], Result], grid: Grid) -> Result:
        grid = grid.at(np.arange(min(_FIRST, len(grid.steps)), len(grid.steps)))
        tensors = grid.tensors.join(self.tensors, on=["layer", "role"], how="left", maintain_order="left")
        return do(OfKinds(grid, tensors, grid.steps < self.warmed_up))


@dataclass(frozen=True)
class OfKinds:
    """Some operands and what kind each is of, over the samples behind the first."""

    grid: Grid
    #: as of `Kinds`, in the order of the grid
    tensors: pl.DataFrame
    #: [S]: whether the learning rate had not reached its highest yet
    warming_up: npt.NDArray[np.bool_]

    def values(self, evidence: Evidence) -> Floats:
        """[T, S]: a metric, scaled so that more is worse."""
        return evidence.scaled(self.grid.metric(evidence.metric))

    def lost(self) -> Floats:
        """[T, S]: percent of values that underflow or overflow."""
        lost: Floats = np.fmax(self.grid.metric("underflow_pct"), self.grid.metric("overflow_pct"))
        return lost

    def phases(self) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        """By name, the samples of each."""
        yield "warm-up", self.warming_up
        yield "later", ~self.warming_up


def _part(last: int) -> pl.Expr:
    """Of the model that a layer of some depth is in."""
    within = pl.when(pl.col("depth") == 0).then(pl.lit("first")).when(pl.col("depth") == last).then(pl.lit("last"))
    return pl.when(pl.col("depth").is_null()).then(pl.lit("outside")).otherwise(within.otherwise(pl.lit("middle")))


def _warmed_up(run: Run) -> float:
    """The first step of the highest learning rate; a tenth of the run where none is recorded."""
    rates = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().sort("step")
    if rates.is_empty():
        steps = run.metrics.steps
        return float(steps[len(steps) // 10]) if len(steps) else 0.0
    return float(rates["step"][int(rates["lr"].arg_max() or 0)])


def lasting(values: Floats) -> Floats:
    """[T, S] -> [T, S]: the least of each sample and the two behind it; what is missing lasts for nothing."""
    padded = np.pad(np.nan_to_num(values, nan=-np.inf), ((0, 0), (0, IN_A_ROW - 1)), constant_values=-np.inf)
    least: Floats = np.lib.stride_tricks.sliding_window_view(padded, IN_A_ROW, axis=1).min(-1)
    return least


def _course(run: Run) -> pl.DataFrame:
    """What a run does, a row a kind of operand and metric."""
    tables = [table for of_part in Kinds.of(run).parts(_courses) for table in of_part]
    by = (*_KIND, "metric", "sign")
    if not tables:
        floats = dict.fromkeys(("median", "lasting"), pl.Float64)
        return pl.DataFrame(schema={name: _SCHEMA[name] for name in by} | {"n": pl.Int64} | floats)
    kinds_of_operands = pl.concat(tables).group_by(*by, maintain_order=True)
    return kinds_of_operands.agg(pl.col("n").max(), pl.col("median").median(), pl.col("lasting").max())


def _courses(kinds: OfKinds) -> list[pl.DataFrame]:
    """A row an operand, by metric and phase."""
    tables = []
    for evidence in JUDGED:
        values = kinds.values(evidence)
        for phase, samples in kinds.phases():
            here = values[:, samples]
            if not here.size:
                continue
            known = np.isfinite(here).any(axis=1)
            middle = np.full(len(here), np.nan)
            middle[known] = np.nanmedian(here[known], axis=1)
            columns = {"median": middle, "lasting": lasting(here).max(axis=1)}
            rows = kinds.tensors.with_columns(phase=pl.lit(phase), **{name: pl.Series(of) for name, of in columns.items()})
            tables.append(rows.filter(pl.Series(known)).with_columns(metric=pl.lit(evidence.metric), sign=evidence.sign))
    return tables


Bools = npt.NDArray[np.bool_]
_KEY = ["layer", "role"]
#: percent of values that underflow or overflow because of an outlier, at least
_COSTS = 0.5
#: how many times the least rise above all that healthy runs did counts
_BEYOND = 1.5


@dataclass(frozen=True)
class JudgedRun:
    """A run against bands."""

    #: operands beyond them: layer, role, onset (step), excess (how many times the least rise that counts), earliest first
    beyond: pl.DataFrame
    #: layer, role of those that have a band
    covered: pl.DataFrame
    #: operands in all
    operands: int
    #: runs that the bands were learned from
    runs: int

    @property
    def all_covered(self) -> bool:
        """Return True if at least nine in ten operands have a band."""
        return len(self.covered) >= 0.9 * self.operands > 0


def told(judged: JudgedRun | None) -> str:
    """Return what stood for the baseline of a run, in a sentence."""
    if judged is None:
        known = "no bands of healthy runs were learned from models of its class"
    elif not len(judged.covered):
        known = "the bands of healthy runs know no operands of such recipes and sizes"
    else:
        return (
            f"Bands of {judged.runs} healthy runs stand for a baseline of {len(judged.covered)} of {judged.operands} "
            "operands; they give medium confidence at most."
        )
    return (
        f"Operands in FP8 are judged by fixed limits, and others by nothing: {known}. `nemo-fp8-debug learn` makes bands of "
        "runs of your own."
    )


def judge(run: Run, bands: Bands) -> JudgedRun:
    """Lay a run's operands against bands.

    Beyond is what lasts for three samples above all that lasted in healthy runs, by as much again as that rose above their
    median. A single sample is judged by fixed limits: a spike of one run is no measure for that of another.
    """
    parts = Kinds.of(run).parts(partial(_judge, bands))
    beyond, covered = (pl.concat(each) for each in zip(*parts, strict=True))
    beyond = beyond.sort("onset", -pl.col("excess"), maintain_order=True)
    return JudgedRun(beyond, covered, len(run.metrics.tensors), bands.runs)


def _judge(bands: Bands, kinds: OfKinds) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the operands beyond their bands, and those that have a band, with the columns of `JudgedRun`."""
    covered = np.zeros(len(kinds.tensors), dtype=bool)
    onset, excess = np.full(len(covered), np.iinfo(np.int64).max), np.zeros(len(covered))
    least = np.where(kinds.tensors["role"].to_numpy() == "grad_output", OF_GRADIENTS, 1.0)
    for evidence in JUDGED:
        values = kinds.values(evidence)
        if evidence.metric == "outlier_log2":  # one that costs no values is no loss
            values = np.where(kinds.lost() > _COSTS, values, np.nan)
        for phase, samples in kinds.phases():
            band = bands.of(kinds.tensors, evidence, phase)
            known = band["lasting"].is_not_null().to_numpy()
            covered |= known & (phase == "later")
            if not samples.any():
                continue
            rise = least * evidence.least_of(band["median"].to_numpy())
            for i, at, times in _out(rise, values[:, samples], band, known):
                step = int(kinds.grid.steps[samples][at])
                onset[i], excess[i] = min(onset[i], step), max(excess[i], times)
    out = np.flatnonzero(excess > 0)
    columns = {"onset": onset[out].astype(np.int64), "excess": excess[out].astype(np.float64)}
    beyond = kinds.tensors.select(_KEY)[out.tolist()].with_columns(pl.Series(name, of) for name, of in columns.items())
    return beyond, kinds.tensors.select(_KEY).filter(pl.Series(covered, dtype=pl.Boolean))


def _out(least: Floats, values: Floats, band: pl.DataFrame, known: Bools) -> Iterator[tuple[int, int, float]]:
    """Tensor, sample and excess of those that are out.

    Args:
        least: [T], the rise that counts.
    """
    median, most = (band[name].to_numpy()[:, None] for name in ("median", "lasting"))
    with np.errstate(invalid="ignore"):
        strength = np.nan_to_num((lasting(values) - most) / np.fmax(least[:, None], most - median), nan=0.0)
    for i in np.flatnonzero(known & (strength > _BEYOND).any(axis=1)):
        at = int(np.argmax(strength[i] > _BEYOND))
        yield int(i), at, float(strength[i, at])

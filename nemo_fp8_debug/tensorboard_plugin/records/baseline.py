"""Compare a run with a baseline: match layer names, compute bands of tensors, and find the step at which the loss
departs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ...analysis.comparison.layer_matching import (
    Names,
    Sizes,
    filter_onsets_for_other_depth,
    has_other_layer_count,
    map_layers_to_baseline,
    match_layers_from_output,
    read_weight_sizes,
)
from ...analysis.comparison.onset import EVIDENCE, MetricBand, TensorBand, compute_tensor_band, find_unfiltered_onsets
from ...analysis.formatting import make_jsonable
from ...analysis.loss.curve import LossCurve
from ...analysis.loss.outcome import LossOutcome
from ...analysis.runs.grid import MetricGrid
from ...analysis.runs.metrics import MetricsTable
from ...analysis.runs.run import Run
from ...core.keys import MIXED
from ...core.scale_sources import ENGINE
from ...core.threads import map_in_threads
from ...errors import ConfigError, capture_warnings
from ...record.reader import read_step_scalars
from ...record.schema import SCHEMAS, Part
from ...record.storage import FolderStorage
from ..cache import LRUCache
from ..web import replace_nonfinite_by_null
from .heatmap import list_newest_tensors
from .metadata import find_table_of_role
from .part_matrices import NONFINITE, Array, CachedPartReader, Layers, SampledStepIndex
from .tensor_history import make_unknown_tensor_error
from .thinning import thin_series

#: number of pairs of records for which names are cached
_PAIRS = 64


class LayerMatchCache:
    """Cached matches of layer names for pairs of records."""

    def __init__(self, parts: CachedPartReader, renames: Sequence[str] = ()) -> None:
        """
        Args:
            renames: rules for the layer names of every run, as in `compare`.
        """
        self._parts, self._renames = parts, renames
        self._pairs: LRUCache[dict[str, Any]] = LRUCache(_PAIRS)

    def match_layers(self, run: FolderStorage, baseline: FolderStorage) -> dict[str, Any]:
        """Return `names` (the baseline's name of each layer that has another name there) and `how` (how the names were
        matched).
        """
        # Names are matched only if the runs have no name in common. Usually the newest parts show whether they have one.
        if not self._renames and not self._of_newest(run).keys().isdisjoint(self._of_newest(baseline)):
            return {"names": {}, "how": ""}
        versions = [self._parts.read_index(record).version for record in (run, baseline)]
        return self._pairs.get_or_make((str(run), str(baseline), *versions), partial(self._match, run, baseline))

    def _match(self, run: FolderStorage, baseline: FolderStorage) -> dict[str, Any]:
        first, second = (list(self._of_all(record)) for record in (baseline, run))
        try:
            found = map_layers_to_baseline(first, second, self._renames, lambda: (_sizes(baseline), _sizes(run)))
        except ConfigError:  # the rules are for the layers of another run
            found = {}, ""
        return dict(zip(("names", "how"), found, strict=True))

    def _of_newest(self, record: FolderStorage) -> Layers:
        return self._parts.read_with_retry(record, partial(list_newest_tensors, self._parts, record)).distinct_layers

    def _of_all(self, record: FolderStorage) -> Layers:
        def read(index: SampledStepIndex) -> Layers:
            layouts = (self._parts.read_layout_unless_damaged(record, part) for part in index.steps_by_part)
            different = dict.fromkeys(layout.tensors for layout in layouts if layout)
            return dict.fromkeys(layer for tensors in different for layer in tensors.distinct_layers)

        return self._parts.read_with_retry(record, read)


def _sizes(record: FolderStorage) -> Sizes:
    with capture_warnings():  # the notes of the run report damage
        return read_weight_sizes(MetricsTable.read(record, held=0))


#: largest number of points in a metric's band
_POINTS = 1000
#: number of cached bands, each for the 6 metrics of a tensor
_KEPT = 64
#: maximum size in bytes of the cache of columns for bands, enough for all columns of a small record
_HELD = 64 << 20
#: number of runs for which losses and quantized steps are cached
_RUNS = 16
#: columns for bands, and the columns to read to compute them
_COLUMNS = ("n", "nan", "inf", "mse", *({evidence.metric for evidence in EVIDENCE} - {NONFINITE}))
_READ = ("step", "scale_source", *_COLUMNS)


class TensorBandCache:
    """Cached bands of tensors, by the state of the records."""

    def __init__(self, parts: CachedPartReader, names: LayerMatchCache) -> None:
        self._parts, self._names = parts, names
        self._bands: LRUCache[dict[str, Any]] = LRUCache(_KEPT)
        self._tables: LRUCache[pa.Table] = LRUCache(_HELD, lambda table: table.nbytes)
        self._quantized: LRUCache[Array | None] = LRUCache(_RUNS)
        self._runs: LRUCache[Run] = LRUCache(_RUNS)

    def find_tensor_band_exit(self, run: FolderStorage, baseline: FolderStorage, layer: str, role: str) -> dict[str, Any]:
        """Return the step at which a tensor left a baseline's band, and the bands of its metrics.

        Args:
            layer: the run's name of the layer.

        Returns:
            `since`: the first step out of the band of any metric, as in `compare`, or null. `metric`: that metric.
            `chance`: whether chance alone explains this onset among so many tensors, so that `compare` may leave it out.
            `why`: the reason why the tensor has no bands, or null. `metrics`: for each metric, the lists `step`, `low`,
            `expected` and `high` (numbers or null), `least` (the least rise that counts, or the least ratio if `is_ratio`),
            `since`, `value` and `usual` (at step `since`), `beyond` (number of samples outside the band), and `counted`
            (number of these samples that count).

        Raises:
            NotFoundError: one of the records does not have the tensor.
        """
        if find_table_of_role(role) != self._parts.table:
            return _not_judged("Only operands of GEMMs have bands, and this tensor is not one of them.")
        versions = [self._parts.read_index(record).version for record in (run, baseline)]
        key = str(run), str(baseline), *versions, layer, role
        return self._bands.get_or_make(key, lambda: self._judged(run, baseline, (layer, role)))

    def find_divergence(self, run: FolderStorage, baseline: FolderStorage | None) -> dict[str, Any]:
        """Return the step from which a run's loss stays above the baseline's loss or above its own minimum, or null."""
        other = None if baseline is None else self._run(baseline).loss
        return {"since": LossOutcome.judge_loss(self._run(run).loss, other).rise_step}

    def _run(self, record: FolderStorage) -> Run:
        """Return the run of a record without reading its metrics."""

        def read() -> Run:
            with capture_warnings():
                metrics = MetricsTable.from_rows(pl.DataFrame(schema=SCHEMAS["metrics"]))
                return Run(str(record), {}, metrics, LossCurve.from_steps_table(read_step_scalars(record, ["step", "loss"])))

        return self._runs.get_or_make((str(record), self._parts.read_index(record).version), read)

    def _judged(self, run: FolderStorage, baseline: FolderStorage, key: tuple[str, str]) -> dict[str, Any]:
        names: Names = self._names.match_layers(run, baseline)["names"]
        layer, role = names.get(key[0], key[0]), key[1]
        reference = self._grid(baseline, (layer, role))
        grid = self._grid(run, key, only_quantized=True)
        if not grid.sampled.any():
            return _not_judged("The engine does not quantize this tensor, so quantization cannot have harmed it.")
        tensors = [self._tensors(baseline), {(names.get(name, name), role) for name, role in self._tensors(run)}]
        found = compute_tensor_band(reference, grid, len(tensors[0] & tensors[1]))
        layers = [{name for name, _ in each} for each in tensors]
        if not has_other_layer_count(*layers):
            return _told(found, found.onsets)
        others = match_layers_from_output(*layers)

        def beside(_: pl.DataFrame) -> pl.DataFrame:
            onsets = find_unfiltered_onsets(self._grid(baseline, (others[layer], role)), grid)
            return onsets.with_columns(layer=pl.lit(layer))

        return _told(found, filter_onsets_for_other_depth(found.onsets, others, beside))

    def _grid(self, run: FolderStorage, key: tuple[str, str], only_quantized: bool = False) -> MetricGrid:
        """Return the grid of a tensor over the samples that `compare` uses."""

        def read(index: SampledStepIndex) -> MetricGrid:
            rows, steps = self._rows(run, index, key), index.steps
            if only_quantized and (judged := self._steps_quantized(run, index)) is not None:
                rows, steps = rows.filter(pl.col("scale_source").is_in([ENGINE, MIXED])), judged
            steps = steps[~np.isin(steps, self._run(run).loss_scale_skips.to_numpy())]
            return MetricsTable.from_rows(rows.filter(pl.col("step").is_in(steps))).grid.extend_steps(steps)

        return self._parts.read_with_retry(run, read)

    def _rows(self, run: FolderStorage, index: SampledStepIndex, key: tuple[str, str]) -> pl.DataFrame:
        """Return the rows of a tensor. Do not keep rows of other tensors in memory."""

        def of_part(part: Part) -> pa.Table | None:
            if (layout := self._parts.read_layout_unless_damaged(run, part)) is None:
                return None
            rows = [row for step in index.steps_by_part[part] if (row := layout.find_row(step, key)) is not None]
            read = partial(self._read_rows, run, part, rows, layout.is_faster_by_tensor)
            return self._parts.read_unless_damaged(run, part, "band", read) if rows else None

        tables = [pl.DataFrame(table) for table in map_in_threads(of_part, list(index.steps_by_part)) if table is not None]
        if not tables:
            raise make_unknown_tensor_error(run, *key)
        rows = pl.concat([table.with_columns(pl.col("scale_source").cast(pl.String)) for table in tables])
        return rows.sort("step").with_columns(layer=pl.lit(key[0]), role=pl.lit(key[1]))

    def _read_rows(self, run: FolderStorage, part: Part, rows: list[int], is_wide: bool) -> pa.Table:
        if is_wide:
            return self._parts.read_few_rows(run, part, _READ, rows)
        return self._tables.get_or_make((str(run), part.path), lambda: self._parts.read_columns(run, part, *_READ)).take(
            rows
        )

    def _steps_quantized(self, run: FolderStorage, index: SampledStepIndex) -> Array | None:
        """Return the sampled steps at which the engine quantizes operands, or None if it never does."""
        return self._quantized.get_or_make((str(run), index.version), lambda: self._find_quantized(run, index))

    def _find_quantized(self, run: FolderStorage, index: SampledStepIndex) -> Array | None:
        steps: list[int] = []
        is_engine = False
        for part, held in index.steps_by_part.items():
            if (only := self._only_source(run, part)) is not None:
                is_engine |= only == ENGINE
                steps += held if only in (ENGINE, MIXED) else []
                continue
            read = partial(self._parts.read_text_column, run, part, "scale_source")
            if (sources := self._parts.read_unless_damaged(run, part, "scale_source", read)) is None:
                continue
            layout = self._parts.read_layout(run, part)
            at = np.searchsorted(layout.steps, held)
            codes = {name: sources.known.index(name) for name in (ENGINE, MIXED) if name in sources.known}
            found = np.isin(sources.codes[at], list(codes.values()))
            is_engine |= ENGINE in codes and bool((sources.codes[at] == codes[ENGINE]).any())
            steps += np.asarray(held)[found.any(axis=1)].tolist()
        return np.array(sorted(steps), np.int64) if is_engine else None

    def _only_source(self, run: FolderStorage, part: Part) -> str | None:
        """Return the scale source of a part's rows, if the part's footer shows that all rows have the same source."""
        known = self._parts.read_outline(run, part).texts.get("scale_source", ())
        return known[0] if len(known) == 1 else None

    def _tensors(self, run: FolderStorage) -> set[tuple[str, str]]:
        def read(index: SampledStepIndex) -> set[tuple[str, str]]:
            found = (self._parts.read_layout_unless_damaged(run, part) for part in index.steps_by_part)
            return {key for tensors in {layout.tensors for layout in found if layout} for key in tensors}

        return self._parts.read_with_retry(run, read)


def _not_judged(why: str) -> dict[str, Any]:
    return {"since": None, "metric": None, "chance": False, "why": why, "metrics": {}}


def _told(found: TensorBand, onsets: pl.DataFrame) -> dict[str, Any]:
    first = onsets.row(0, named=True) if len(onsets) else {"onset": None, "metric": None}
    since = {row["metric"]: row for row in reversed(onsets.to_dicts())}
    return {
        "since": first["onset"],
        "metric": first["metric"],
        "chance": bool(len(onsets)) and not found.is_sure,
        "why": None,
        "metrics": {name: _drawn(found.steps, band) | _out(since.get(name)) for name, band in found.metrics.items()},
    }


def _drawn(steps: Array, band: MetricBand) -> dict[str, Any]:
    kept = thin_series([band.low, band.expected, band.high], _POINTS)
    lines = {name: replace_nonfinite_by_null(getattr(band, name)[kept]) for name in ("low", "expected", "high")}
    about = {name: getattr(band, name) for name in ("least", "is_ratio", "beyond", "counted")}
    told: dict[str, Any] = make_jsonable(about)
    return {"step": steps[kept].tolist(), **lines, **told}


def _out(onset: dict[str, Any] | None) -> dict[str, Any]:
    """Return the onset of a metric, and the metric's actual and usual value at the onset."""
    if onset is None:
        return {"since": None, "value": None, "usual": None}
    told: dict[str, Any] = make_jsonable({"since": onset["onset"], "value": onset["value"], "usual": onset["expected"]})
    return told

"""Audit the weights of a checkpoint: measure their errors, and describe them in sentences.

For each weight, we measure three errors: in FP8 under current scaling, in FP8 under the stored scale, and in BF16.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.arguments import quote_names
from ...core.text import format_number
from ...errors import ConfigError, RecordError, warn
from ...kernels import add_to_histogram
from ...numerics import metrics
from ...numerics.formats import BF16, E4M3, E5M2, FloatFormat
from ...numerics.histogram import DTYPES, Histogram, HistogramBatch
from ...numerics.metrics import QuantizationSums, ValueMoments
from ...numerics.recipe import Recipe, parse_recipe, refuse_block_scaling
from ...numerics.tensor_scaling import CurrentScaling
from ..formatting import make_jsonable
from .contents import CheckpointContents, open_checkpoint
from .weights import FP8_DTYPES, GemmWeight, StoredScale, find_gemm_weights, find_stored_weight_scale

#: state of an FP8 weight whose scale is not in the checkpoint; we then measure its FP8 values without a scale
NO_SCALE = "no scale"


@dataclass(frozen=True)
class CheckpointAudit:
    """The findings about a checkpoint."""

    path: str
    format: str
    #: format of the weights under current scaling
    fp8_format: FloatFormat
    #: one row for each weight, worst first
    rows: list[dict[str, Any]]
    #: number of tensors that are not weights of GEMMs, by kind
    left_out: Counter[str]
    #: sentences about unreadable parts
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain values, with null for values that are unavailable."""
        return {
            "path": self.path,
            "format": self.format,
            "fp8_format": self.fp8_format.name,
            "verdict": self.verdict(),
            "left_out": dict(self.left_out),
            "faults": self.faults,
            "weights": self.rows,
        }

    def verdict(self) -> list[str]:
        """Return the findings in sentences."""
        parts = [self._read(), self._without_scale(), self._nonfinite(), self._in_fp8(), self._stored(), self._in_bf16()]
        return [sentence for sentence in parts if sentence]

    def _read(self) -> str:
        values = sum(math.prod(row["shape"]) for row in self.rows)
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in Counter(row["dtype"] for row in self.rows).items())
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.left_out.items())
        left_out = f"; left out: {sum(self.left_out.values())} tensors that are not GEMM weights ({kinds})" if kinds else ""
        return f"Weights: {len(self.rows)}, values: {format_number(values, digits=4)} ({dtypes}){left_out}."

    def _without_scale(self) -> str:
        lost = [row["layer"] for row in self.rows if lacks_scale(row)]
        if not lost:
            return ""
        return (
            f"{len(lost)} of {len(self._stored_in_fp8())} FP8 weights have no stored scale: {quote_names(lost)}. "
            "If the checkpoint lost their scales, a server loads wrong weights. The errors below leave these weights out."
        )

    def _nonfinite(self) -> str:
        bad = [row["layer"] for row in self.rows if row["nan"] or row["inf"]]
        return f"With NaN or infinity: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}." if bad else ""

    def _in_fp8(self) -> str:
        """Return a sentence with the errors of weights that were trained in higher precision and are served in FP8."""
        errors = _errors(self.rows, "fp8_current")
        already = " (cast again with one scale, if they are stored in FP8)" if self._stored_in_fp8() else ""
        return f"Served in FP8 ({self.fp8_format.name}) under current scaling, the weights change{already} by {errors}."

    def _stored_in_fp8(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["dtype"].startswith("float8")]

    def _stored(self) -> str:
        """Return sentences about the fit of stored scales, and about the changes of weights when served in BF16."""
        with_scale = [row for row in self.rows if row["fp8_stored"] and "scale" in row["fp8_stored"]]
        if not with_scale:
            return (
                "No weight has a stored scale to compare with, so it is unknown whether training used FP8. If it used FP8 "
                "with current scaling, serving in BF16 changes the weights by as much as serving in FP8 would."
            )
        states = Counter(row["fp8_stored"]["state"] for row in with_scale)
        said = ", ".join(f"{state} ({n})" for state, n in states.most_common())
        engine = [row for row in with_scale if not row["dtype"].startswith("float8")]
        served = (
            f" Served in FP8 with these scales, the weights change by {_errors(engine, 'fp8_stored')}. "
            "If the model was trained with them, its weights in BF16 differ by as much from the FP8 weights in training."
        )
        return f"Stored scales of {len(with_scale)} weights: {said}." + (served if engine else "")

    def _in_bf16(self) -> str:
        wide = [row for row in self.rows if row["dtype"] != "bfloat16"]
        rounding = f"Served in BF16, weights of other dtypes ({len(wide)}) change by {_errors(wide, 'bf16')}."
        made = " The checkpoint does not show the error of storing weights in FP8." if self._stored_in_fp8() else ""
        return (rounding if wide else "Served in BF16, the weights are as stored.") + made


def lacks_scale(row: Mapping[str, Any]) -> bool:
    """Return True for an FP8 weight without a scale in the checkpoint."""
    return bool((row["fp8_stored"] or {}).get("state") == NO_SCALE)


def _errors(rows: Sequence[Mapping[str, Any]], cast: str) -> str:
    """Return the median and the worst relative error of a cast over all weights except FP8 weights without a scale."""
    errors = {row["layer"]: row[cast]["relative_error"] for row in rows if not lacks_scale(row)}
    known = {layer: error for layer, error in errors.items() if error is not None}
    if not known:
        return "an unknown amount"
    worst = max(known, key=lambda layer: known[layer])
    return (
        f"{format_number(100 * statistics.median(known.values()))}% (median relative error; "
        f"worst {format_number(100 * known[worst])}%: {worst})"
    )


#: metrics of a weight itself, and metrics of a weight under one scale and format
_OF_WEIGHT = ("amax", "amin", "dynamic_range_log2", "outlier_log2", "kurtosis")
_OF_CAST = ("relative_error", "mse", "sqnr_db", "cosine", "underflow_pct", "overflow_pct")
#: a stored scale is stale if log2(stored / current scale) is below this. Such a scale wastes at least 3 of the 17.8 powers
#: of two in E4M3's range
FAR_BELOW = -3.0
#: largest number of weights with a histogram in memory at once, 256 KiB each
_BATCH = 64
_CURRENT = CurrentScaling()
_BOTH = torch.zeros(2, dtype=torch.int64)
#: number of float32 values processed at once, so that their float64 temporaries stay in the cache
_PIECE = 1 << 16
#: number of values of a weight to read at once, in multiples of `_ROWS` rows, so that no 128 x 128 block is split
_BLOCK, _ROWS = 1 << 20, 128

#: scales (float32 [B]) and formats of B weights
_Cast = tuple[torch.Tensor, list[FloatFormat]]


def audit(
    path: str | os.PathLike[str],
    recipe: str | Mapping[str, Any] | Recipe = "current",
    matches: Callable[[str], bool] = lambda name: True,
) -> CheckpointAudit:
    """Measure the GEMM weights of a checkpoint. Read values block by block, and warn of unreadable parts.

    Args:
        path: a Megatron distributed, NeMo 2 or DCP checkpoint (folders), safetensors, or a file of torch.save or Lightning.
        recipe: the recipe for serving, a name or a dict as in `Config.recipe`. We use only its weight format and its options
            of current scaling.
        matches: function that takes a weight's name and returns True to measure the weight. By default, all weights are
            measured.

    Returns:
        The audit. `.rows` has a dict for each weight, worst first. `.verdict()` returns sentences, and `.to_json()` returns
        plain values.

    Raises:
        RecordError: there is no checkpoint, or no part of it is readable. The message names the file.
        ConfigError: no weight matches, or the recipe is unknown or scales blocks.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> save_file({"layers.0.fc1.weight": torch.ones(64, 32, dtype=torch.bfloat16)}, "model.safetensors")
        >>> audit("model.safetensors").rows[0]["fp8_current"]["relative_error"]
        0.0
    """
    path, recipe = Path(path), parse_recipe(recipe)
    refuse_block_scaling(recipe, "the audit")
    contents = open_checkpoint(path)
    weights, left_out = find_gemm_weights(contents)
    chosen = [weight for weight in weights if matches(weight.name)]
    if not weights:
        held = "; ".join([f"{n} tensors ({kind})" for kind, n in left_out.items()] + contents.faults)
        raise RecordError(f"{path} holds no weight of a GEMM, only {held}")
    if not chosen:
        raise ConfigError(f"no weight matches; the checkpoint has {quote_names(sorted(weight.name for weight in weights))}")

    #: names of weights in unreadable parts, by the message about the part
    faults = defaultdict[str, list[str]](list)
    rows: list[dict[str, Any]] = []
    seen: list[_Seen] = []
    for weight in chosen:
        try:
            seen.append(_see(weight, contents, recipe, path, faults))
        except RecordError as error:
            faults[str(error)].append(weight.name)
        if len(seen) == _BATCH:
            rows, seen = rows + _rows(seen, recipe), []
    rows += _rows(seen, recipe)
    found = contents.faults + [
        f"{fault} (affects {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"
        for fault, names in faults.items()
    ]
    if not rows:
        raise RecordError("; ".join(found))
    for fault in found:
        warn(fault)
    return CheckpointAudit(
        str(path), contents.format, recipe.get_format("weight"), sorted(rows, key=_badness), left_out, found
    )


@dataclass(frozen=True)
class _Seen:
    """The result of reading a weight: its histogram if its dtype has 16 bits, otherwise its moments and sums."""

    weight: GemmWeight
    histogram: Histogram
    stored: StoredScale | None
    #: reason why the weight has no stored scale to compare with, if the checkpoint has other data instead of a scale
    note: str | None
    moments: ValueMoments | None = None
    sums: tuple[QuantizationSums, ...] = ()


def _see(
    weight: GemmWeight, contents: CheckpointContents, recipe: Recipe, path: Path, faults: Mapping[str, list[str]]
) -> _Seen:
    scale = _companion(weight)
    stored, note = _stored_scale(weight, scale, contents, path, faults)
    direct = weight.dtype not in DTYPES
    histogram = Histogram(torch.bfloat16 if direct else weight.dtype, rounded=direct)
    moments, read = None, 0
    for block in _blocks(weight, scale, path):
        add_to_histogram(histogram, block)
        read += block.numel()
        if direct:
            moments = _moments(block, moments)
    if read != weight.shape[0] * weight.shape[1]:
        raise RecordError(f"{path} has only {read} of the {weight.shape[0] * weight.shape[1]} values of {weight.name}")
    if moments is None:
        return _Seen(weight, histogram, stored, note)
    now, then, bf16 = _casts(moments.amax.float(), [stored], recipe)
    sums = _sums(weight, scale, path, (now, then, bf16) if stored else (now, bf16))
    return _Seen(weight, histogram, stored, note, moments, sums if stored else (sums[0], sums[0], sums[1]))


# Add up the sums immediately, because many small results between large temporaries would fragment the heap.
def _moments(block: torch.Tensor, total: ValueMoments | None) -> ValueMoments:
    for piece in block.reshape(-1).split(_PIECE):
        found = metrics.compute_float32_moments(piece)
        total = found if total is None else metrics.merge_moments(ValueMoments.concat([total, found]))
    return total if total is not None else metrics.compute_float32_moments(block)


def _sums(
    weight: GemmWeight, scale: torch.Tensor | None, path: Path, casts: Sequence[_Cast]
) -> tuple[QuantizationSums, ...]:
    """Read a weight once more and return its sums under each cast."""
    empty = torch.zeros(0)
    totals = [metrics.quantization_sums_of_float32(empty, factor[0], formats[0]) for factor, formats in casts]
    for block in _blocks(weight, scale, path):
        for piece in block.reshape(-1).split(_PIECE):
            for i, (factor, formats) in enumerate(casts):
                found = metrics.quantization_sums_of_float32(piece, factor[0], formats[0])
                totals[i] = QuantizationSums.concat([totals[i], found]).sum_rows_by_owner(_BOTH, 1)
    return tuple(totals)


def _blocks(weight: GemmWeight, scale: torch.Tensor | None, path: Path) -> Iterator[torch.Tensor]:
    """Yield a weight's values block by block: 16-bit dtypes unchanged, and other dtypes as float32."""
    for part in weight.parts:
        stored = part.load_values()
        if stored.dtype != weight.dtype or stored.dim() != 2:
            raise RecordError(f"{path} is damaged: {weight.name} is {stored.dtype} {tuple(stored.shape)} there")
        rows = max(1, _BLOCK // max(1, stored.shape[1] * _ROWS)) * _ROWS
        for first, block in zip(range(0, len(stored), rows), stored.split(rows), strict=False):
            if weight.dtype in DTYPES:
                yield block
            else:
                yield block.float() if scale is None else block.float() * _scale_of(scale, weight, first, block)


def _companion(weight: GemmWeight) -> torch.Tensor | None:
    """Return the factor of an FP8 weight, float32: one value for the weight, for each row [rows, 1], or for each 128 x 128
    block.

    Raises:
        RecordError: the factor has another shape.
    """
    if weight.dtype not in FP8_DTYPES or weight.scale is None:
        return None
    scale, (rows, columns) = weight.scale.load_values().float(), weight.shape
    if scale.numel() == 1:
        return scale.reshape(())
    if len(weight.parts) == 1 and scale.shape in ((rows,), (rows, 1)):
        return scale.reshape(rows, 1)
    if len(weight.parts) == 1 and scale.shape == (math.ceil(rows / _ROWS), math.ceil(columns / _ROWS)):
        return scale
    raise RecordError(f"{weight.name}: unsupported scale of shape {tuple(scale.shape)} for a weight of shape {weight.shape}")


def _scale_of(scale: torch.Tensor, weight: GemmWeight, first: int, block: torch.Tensor) -> torch.Tensor:
    """Return the scales of a block of whole rows of a weight, in a shape that broadcasts over the block."""
    rows, columns = block.shape
    if scale.dim() == 0:
        return scale
    if scale.shape[0] == weight.shape[0]:
        return scale[first : first + rows]
    wide = scale[first // _ROWS : math.ceil((first + rows) / _ROWS)].repeat_interleave(_ROWS, 0)[:rows]
    return wide.repeat_interleave(_ROWS, 1)[:, :columns]


def _stored_scale(
    weight: GemmWeight, scale: torch.Tensor | None, contents: CheckpointContents, path: Path, faults: Mapping[str, list[str]]
) -> tuple[StoredScale | None, str | None]:
    """Return the checkpoint's scale of a weight, or the reason why there is no scale to compare with."""
    if scale is not None:
        if scale.dim():
            return None, "one a row" if scale.shape[0] == weight.shape[0] else "one a block"
        return StoredScale(float(1 / scale), E5M2 if weight.dtype == torch.float8_e5m2 else E4M3, False), None
    if weight.dtype in FP8_DTYPES:
        return None, NO_SCALE
    if weight.extra_state is None:
        return None, None
    try:
        found = find_stored_weight_scale(
            contents.extra_states[weight.extra_state](), weight.parameter, f"{path}: {weight.extra_state}"
        )
    except RecordError as error:
        faults[str(error)].append(f"the stored scale of {weight.name}")
        return None, "unreadable"
    return (None, "unclear: one of several experts") if found and weight.expert else (found, None)


def _casts(amax: torch.Tensor, stored: Sequence[StoredScale | None], recipe: Recipe) -> tuple[_Cast, _Cast, _Cast]:
    """Return three casts of B weights: FP8 under current scales, FP8 under stored scales (1 if no scale is stored), and
    BF16.
    """
    fmt = recipe.get_format("weight")
    rule = recipe.scaling if isinstance(recipe.scaling, CurrentScaling) else _CURRENT
    scales = torch.tensor([s.scale if s and _usable(s) else 1.0 for s in stored], dtype=torch.float32)
    formats = [s.format if s else fmt for s in stored]
    return (
        (rule.compute_scale(amax, fmt.max), [fmt] * len(stored)),
        (scales, formats),
        (torch.ones_like(amax), [BF16] * len(stored)),
    )


def _usable(stored: StoredScale) -> bool:
    return 0 < stored.scale < math.inf


def _rows(seen: Sequence[_Seen], recipe: Recipe) -> list[dict[str, Any]]:
    if not seen:
        return []
    batch = HistogramBatch.pack_histograms([s.histogram for s in seen])
    counted = metrics.compute_histogram_moments(batch)
    moments = ValueMoments.concat(
        [counted.row(i) if s.moments is None else s.moments.with_median(counted.row(i).median) for i, s in enumerate(seen)]
    )
    amax = moments.amax.float()
    tables = []
    for which, (scale, formats) in enumerate(_casts(amax, [s.stored for s in seen], recipe)):
        summed = metrics.quantization_sums_of_histograms(batch, scale, formats)
        sums = QuantizationSums.concat([s.sums[which] if s.sums else summed.row(i) for i, s in enumerate(seen)])
        current = _CURRENT.compute_scale(amax, torch.tensor([fmt.max for fmt in formats]))
        found = metrics.compute_metrics(moments, sums, scale, current)
        tables.append(
            {name: make_jsonable(column.tolist()) for name, column in found.items()} | {"scale": scale.double().tolist()}
        )
    now, then, bf16 = tables
    return [
        {
            "layer": s.weight.name,
            "dtype": str(s.weight.dtype).removeprefix("torch."),
            "shape": list(s.weight.shape),
            "n": int(moments.n[i]),
            "nan": int(moments.nan[i]),
            "inf": int(moments.inf[i]),
            **{name: now[name][i] for name in _OF_WEIGHT},
            "fp8_current": {"scale": now["scale"][i], **{name: now[name][i] for name in _OF_CAST}},
            "fp8_stored": _stored_row(s, then, i),
            "bf16": {name: bf16[name][i] for name in _OF_CAST},
        }
        for i, s in enumerate(seen)
    ]


def _stored_row(seen: _Seen, table: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any] | None:
    if seen.stored is None:
        return None if seen.note is None else {"state": seen.note}
    if not _usable(seen.stored):
        return {"state": "invalid", "scale": None}
    row = {name: table[name][i] for name in ("scale", "scale_ratio_log2", *_OF_CAST)}
    return {"state": _state(seen.stored, row), "format": seen.stored.format.name, **row}


def _state(stored: StoredScale, row: Mapping[str, Any]) -> str:
    """Describe whether a stored scale still fits its weight."""
    if stored.unset:
        return "never set"
    if (row["overflow_pct"] or 0) > 0:
        return "stale: clips"
    return "stale: far below" if (row["scale_ratio_log2"] or 0) < FAR_BELOW else "fits"


def _badness(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Return the sort key: FP8 weights without a scale first, then NaN or infinity, then the largest error in FP8."""
    errors = [cast.get("relative_error") or 0.0 for cast in (row["fp8_current"], row["fp8_stored"] or {})]
    return not lacks_scale(row), not (row["nan"] or row["inf"]), -max(errors)

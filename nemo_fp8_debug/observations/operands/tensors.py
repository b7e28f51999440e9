"""Tensors that are counted in histograms: how we sum them over ranks, and the rows of their tables.

Ranks exchange only the occupied binades of histograms, together with sums and extremes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from ...capture.operand_stats import CastDescription, OperandStats, collect_operand_stats
from ...capture.operands import OperandAccumulator
from ...core.keys import Key
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, FeatureObservation, Lanes
from ...core.plain_arrays import Array
from ...core.table import Columns
from ...distributed import MonitoredRanks
from ...numerics.block_scaling import CODES
from ...numerics.histogram import BINS, Histogram
from ...numerics.metrics import QuantizationSums, ValueMoments
from .measure import OperandMeasurements, measure_tensors

Stats = list[OperandStats]
#: bins of a histogram that are sent together: a binade of bfloat16, an eighth of a binade of float16
BINADE = 128
BINADES = BINS // BINADE
#: marks an absent number. It is smaller than any other number, so a maximum over ranks ignores it
NONE = int(np.iinfo(np.int32).min)
#: numbers of each tensor to be maximized over ranks. A minimum is the maximum of the negated number. Floats are compared by
#: their bits, which have the same order if no float is negative. `further` is the number of additional sums of the tensor
EXTREMES = ("amax", "scale_max", "amin", "scale_min", "order", "cast", "dtype_max", "dtype_min", "further")
_MOMENTS = ("n", "nan", "inf", "sum_x2", "sum_x4")
_SUMS = tuple(f.name for f in fields(QuantizationSums))
_DTYPES = ("bfloat16", "float16", "float32")
#: kinds of sums: for casts in use, for copies, and for each what-if recipe
_IN_USE, _COPY, _TRIED = "in use", "copy", "tried"
_Group = tuple[str, str]


class TensorObservation(FeatureObservation):
    """The observation of the tensors of one feature, by (layer, role)."""

    name = ""
    #: roles of the feature's tensors
    roles: Collection[str] = ()

    def __init__(self, kinds: Mapping[Key, str], ranks: MonitoredRanks) -> None:
        """
        Args:
            kinds: kinds of all tensors that any rank may have.
        """
        self._sums = TensorSums(kinds, ranks)

    @property
    def mixed(self) -> Sequence[Key]:
        """Tensors of the last sample whose dtype differs between ranks."""
        return self._sums.mixed

    def collect_results(self, mine: object, operands: Sequence[OperandAccumulator]) -> Stats:
        """See `FeatureObservation`."""
        return collect_operand_stats([operand for operand in operands if operand.role in self.roles])

    def pack_results(self, plan: AgreedSampleSettings, found: Stats | None, expected: Collection[Key]) -> Arrays:
        """See `FeatureObservation`."""
        return self._sums.pack_results(plan, found or [], expected)

    def collect_maxima(self, packed: Arrays) -> torch.Tensor:
        """See `FeatureObservation`."""
        return self._sums.collect_maxima(packed)

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `FeatureObservation`."""
        return self._sums.collect_sums(plan, packed, extremes)

    def combine_all_ranks(self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor) -> Stats:
        """See `FeatureObservation`."""
        return self._sums.combine_all_ranks(plan, sums, extremes)

    def measure_tensors(self, sampled: CombinedObservations) -> OperandMeasurements:
        """Return the metrics of whole tensors."""
        return measure_tensors(sampled.whole[self.name], sampled.what_if, sampled.chosen)


def sort_in_use_rows_first(columns: Columns) -> dict[str, list[Any]]:
    """Return rows in use, followed by rows under other recipes. Keep the order of rows otherwise.

    Example:
        >>> sort_in_use_rows_first({"layer": ["a", "a", "b"], "scale_source": ["engine", "what-if", "engine"]})["layer"]
        ['a', 'b', 'a']
    """
    tried = [source == "what-if" for source in columns["scale_source"]]
    order = sorted(range(len(tried)), key=lambda i: tried[i])
    return {name: [values[i] for i in order] for name, values in columns.items()}


def append_what_if_rows(in_use: Columns, tried: Columns, own: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return rows in use with additional columns, followed by rows under other recipes, where these columns are None."""
    none = [None] * len(tried.get("layer", ()))
    return {name: [*values, *tried.get(name, none)] for name, values in {**in_use, **own}.items()}


def _groups(plan: AgreedSampleSettings) -> list[_Group]:
    copies = [(_COPY, "")] if plan.copies else []
    return [(_IN_USE, ""), *((_TRIED, recipe) for recipe in plan.what_if), *copies]


def _sums_of(stat: OperandStats, group: _Group) -> QuantizationSums | None:
    kind, recipe = group
    return stat.sums if kind == _IN_USE else stat.copy if kind == _COPY else stat.what_if.get(recipe)


def _columns(plan: AgreedSampleSettings) -> list[tuple[_Group | None, str | int]]:
    """Return the keys of a tensor's sums in addition to its counts: a group and a name, or the number of a scale."""
    scales: list[str | int] = [*range(CODES + 1), "scales"] if plan.block_scales else []
    of_groups = [(group, name) for group in _groups(plan) for name in ("measured", *_SUMS)]
    return [*((None, name) for name in ("expected", "made", "calls", *_MOMENTS)), *of_groups, *((None, s) for s in scales)]


class TensorSums:
    """Adds up the statistics of K tensors over ranks. This rank has observed parts of M of these tensors."""

    def __init__(self, kinds: Mapping[Key, str], ranks: MonitoredRanks) -> None:
        """
        Args:
            kinds: kinds of all tensors that any rank may have, by (layer, role), in the same order on all ranks.
        """
        self.kinds = dict(kinds)
        self._keys, self._ranks = list(kinds), ranks
        self._index = {key: i for i, key in enumerate(self._keys)}
        self._casts: dict[int, CastDescription] = {}
        self._numbers: dict[CastDescription, int] = {}
        #: tensors of the last sample that were left out, because their dtype differs between ranks
        self.mixed: list[Key] = []

    def pack_results(self, plan: AgreedSampleSettings, stats: Sequence[OperandStats], expected: Collection[Key]) -> Arrays:
        """Return this rank's contribution as plain arrays.

        Args:
            expected: tensors that this rank should have.
        """
        rows = np.array([self._index[s.key] for s in stats], np.int64)
        binades = [s.histogram.counts.numpy().reshape(BINADES, BINADE) for s in stats]
        occupied = np.zeros((len(stats), BINADES), bool)
        for row, found in zip(occupied, binades, strict=True):
            row[:] = found.max(1) > 0
        counts = [found[row] for found, row in zip(binades, occupied, strict=True)]
        known = np.array(sorted(self._index[key] for key in expected if key in self._index), np.int64)
        further = [s.further.numpy() for s in stats if s.further is not None]
        return {
            "rows": rows,
            "expected": known,
            "occupied": occupied,
            "counts": np.concatenate([np.zeros((0, BINADE), np.int64), *counts]),
            "extremes": self._extremes(stats),
            "numbers": _numbers(stats, plan),
            "further": np.concatenate([np.zeros(0), *further]),
            "further_of": np.array([0 if s.further is None else len(s.further) for s in stats], np.int64),
        }

    def _extremes(self, stats: Sequence[OperandStats]) -> Array:
        """Return this rank's `EXTREMES`, int32 [M, 9]."""
        absent = (np.nan, np.nan)
        amin = [s.moments.amin.item() if s.moments else np.nan for s in stats]
        scales = [s.scales or absent for s in stats]
        floats = [(s.amax, high, least, low) for s, least, (low, high) in zip(stats, amin, scales, strict=True)]
        values = np.array(floats, dtype=np.float32).reshape(-1, 4)
        bits = np.where(np.isnan(values), NONE, values.view(np.int32) * np.array([1, 1, -1, -1], dtype=np.int32))
        orders = [NONE if s.nonfinite_order is None else -s.nonfinite_order for s in stats]
        dtypes = [_DTYPES.index(s.cast.dtype) for s in stats]
        further = [0 if s.further is None else len(s.further) for s in stats]
        casts = [self._number_of(s.cast) for s in stats]
        rest = np.array([orders, casts, dtypes, [-d for d in dtypes], further], dtype=np.int32)
        found: Array = np.concatenate([bits, rest.T], 1).astype(np.int32)
        return found

    def collect_maxima(self, packed: Arrays) -> torch.Tensor:
        """Return the extremes and whether each binade is occupied, to be maximized over ranks: int32 [K * (9 + 256)]."""
        made = np.full((len(self._keys), len(EXTREMES) + BINADES), NONE, np.int32)
        made[:, len(EXTREMES) :] = 0
        made[packed["rows"]] = np.concatenate([packed["extremes"], packed["occupied"].astype(np.int32)], 1)
        return torch.from_numpy(made).flatten()

    def _seen(self, extremes: torch.Tensor) -> tuple[Array, dict[str, Array], Array]:
        """Return the tensors of all ranks (int64 [S]), their extremes (int32 [S]) and occupied binades (bool [S, 256])."""
        table = extremes.numpy().reshape(len(self._keys), len(EXTREMES) + BINADES)
        seen = (table[:, EXTREMES.index("cast")] != NONE).nonzero()[0]
        table = table[seen]
        return seen, dict(zip(EXTREMES, table[:, : len(EXTREMES)].T, strict=True)), table[:, len(EXTREMES) :] > 0

    def read_amaxes(self, extremes: torch.Tensor) -> dict[Key, float]:
        """Return the largest finite magnitude of each tensor over all ranks."""
        seen, column, _ = self._seen(extremes)
        return {self._keys[i]: value for i, value in zip(seen.tolist(), _floats(column["amax"]).tolist(), strict=True)}

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """Return a row of numbers for each of S tensors, the further sums of some tensors, and all occupied binades."""
        seen, column, occupied = self._seen(extremes)
        numbers = np.zeros((len(self._keys), len(_columns(plan))))
        numbers[packed["rows"]] = packed["numbers"]
        numbers[packed["expected"], 0] = 1.0
        further = np.zeros(int(column["further"].sum()))
        begins = _begins(column["further"])[np.searchsorted(seen, packed["rows"])]
        own = np.split(packed["further"], _begins(packed["further_of"])[1:]) if len(packed["rows"]) else []
        for begin, values in zip(begins.tolist(), own, strict=True):
            further[begin : begin + len(values)] = values
        place = (occupied.reshape(-1).cumsum() - 1).reshape(occupied.shape)
        counts = np.zeros((int(occupied.sum()), BINADE))
        counts[place[np.searchsorted(seen, packed["rows"])][packed["occupied"]]] = packed["counts"]
        parts = numbers[seen].reshape(-1), further, counts.reshape(-1)
        return {lane: torch.from_numpy(part) for lane, part in enumerate(parts)}

    def combine_all_ranks(self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor) -> list[OperandStats]:
        """Return the statistics of whole tensors."""
        seen, column, occupied = self._seen(extremes)
        names = _columns(plan)
        numbers = dict(zip(names, sums[0].view(-1, len(names)).T, strict=True))
        histograms = _histograms(sums[2].view(-1, BINADE), torch.from_numpy(occupied))
        keys = [self._keys[i] for i in seen.tolist()]
        return self._whole(plan, keys, column, numbers, histograms, sums[1].split(column["further"].tolist()))

    def _whole(
        self,
        plan: AgreedSampleSettings,
        keys: Sequence[Key],
        column: Mapping[str, Array],
        numbers: Mapping[tuple[_Group | None, str | int], torch.Tensor],
        counts: Sequence[torch.Tensor],
        further: Sequence[torch.Tensor],
    ) -> list[OperandStats]:
        amax, high = _floats(column["amax"]), _floats(column["scale_max"])
        amin, low = _floats(-column["amin"]), _floats(-column["scale_min"])
        moments = _moments(numbers, torch.from_numpy(amax), torch.from_numpy(amin))
        groups = {group: _sums(numbers, group) for group in _groups(plan)}
        all_have = {g: (numbers[g, "measured"] == numbers[None, "made"]).tolist() for g in groups}
        made, calls, expected = (numbers[None, name].long().tolist() for name in ("made", "calls", "expected"))
        found = {name: values.tolist() for name, values in column.items()}
        stats, self.mixed = [], []
        for i, (key, top, lowest, highest) in enumerate(zip(keys, amax.tolist(), low.tolist(), high.tolist(), strict=True)):
            if found["dtype_max"][i] != -found["dtype_min"][i]:
                self.mixed.append(key)  # counts of different dtypes cannot be added up
                continue
            cast, order = self._cast_of(found["cast"][i]), found["order"][i]
            rounded = cast.dtype == "float32"
            histogram = Histogram(torch.float16 if cast.dtype == "float16" else torch.bfloat16, counts[i], rounded)
            rows = {g: sums.row(i) for g, sums in groups.items() if all_have[g][i]}
            stats.append(
                OperandStats(
                    key=key,
                    kind=self.kinds[key],
                    cast=cast,
                    histogram=histogram,
                    amax=top,
                    moments=moments.row(i) if rounded else None,
                    sums=rows.get((_IN_USE, "")),
                    what_if={recipe: row for (kind, recipe), row in rows.items() if kind == _TRIED},
                    copy=rows.get((_COPY, "")),
                    scales=(lowest, highest) if lowest == lowest else None,
                    parts=[(cast, lowest if lowest == highest else None, histogram)],
                    block_scales=_block_scales(numbers, i) if plan.block_scales else None,
                    further=further[i] if len(further[i]) else None,
                    calls=calls[i],
                    nonfinite_order=None if order == NONE else -order,
                    ranks=made[i],
                    missing=expected[i] - made[i],
                )
            )
        return stats

    def _number_of(self, cast: CastDescription) -> int:
        """Return a number of 31 bits that identifies a cast on all ranks."""
        if cast not in self._numbers:
            number = zlib.crc32(json.dumps(vars(cast)).encode()) >> 1
            self._ranks.publish_if_absent(f"cast/{number}", vars(cast))
            self._numbers[cast], self._casts[number] = number, cast
        return self._numbers[cast]

    def _cast_of(self, number: int) -> CastDescription:
        if number not in self._casts:
            self._casts[number] = CastDescription(**self._ranks.await_value(f"cast/{number}"))
        return self._casts[number]


def _numbers(stats: Sequence[OperandStats], plan: AgreedSampleSettings) -> Array:
    """Return this rank's numbers to be summed, float64 [M, columns]."""
    columns = {name: np.zeros(len(stats)) for name in _columns(plan)}
    columns[None, "expected"] += 1
    columns[None, "made"] += 1
    columns[None, "calls"][:] = [s.calls for s in stats]
    if chosen := [i for i, s in enumerate(stats) if s.moments]:
        moments = ValueMoments.concat([m for s in stats if (m := s.moments)])
        for name in _MOMENTS:
            columns[None, name][chosen] = getattr(moments, name).double().numpy()
    for i, stat in enumerate(stats) if plan.block_scales else ():
        if stat.block_scales is not None:
            for at, count in enumerate(stat.block_scales.tolist()):
                columns[None, at][i] = count
            columns[None, "scales"][i] = 1
    for group in _groups(plan):
        rows = [_sums_of(s, group) for s in stats]
        if chosen := [i for i, row in enumerate(rows) if row]:
            sums = QuantizationSums.concat([row for row in rows if row])
            columns[group, "measured"][chosen] = 1.0
            for name in _SUMS:
                columns[group, name][chosen] = getattr(sums, name).double().numpy()
    return np.stack(list(columns.values()), 1)


def _histograms(counts: torch.Tensor, occupied: torch.Tensor) -> list[torch.Tensor]:
    """Return each histogram's counts, int64 [32768]."""
    found = []
    for binades, mine in zip(occupied, counts.split(occupied.sum(1).tolist()), strict=True):
        dense = torch.zeros(BINADES, BINADE, dtype=torch.int64)
        dense[binades] = mine.long()
        found.append(dense.flatten())
    return found


def _moments(
    numbers: Mapping[tuple[_Group | None, str | int], torch.Tensor], amax: torch.Tensor, amin: torch.Tensor
) -> ValueMoments:
    """Return the moments of float32 tensors. The median is NaN, because it comes from the histogram.

    Args:
        amax, amin: float32 [S].
    """
    counts = {name: numbers[None, name].long() for name in ("n", "nan", "inf")}
    powers = {name: numbers[None, name] for name in ("sum_x2", "sum_x4")}
    return ValueMoments(amax=amax.double(), amin=amin.double(), median=torch.full_like(amax, torch.nan), **counts, **powers)


def _sums(numbers: Mapping[tuple[_Group | None, str | int], torch.Tensor], group: _Group) -> QuantizationSums:
    counts = {name: numbers[group, name].long() for name in ("underflows", "overflows")}
    return QuantizationSums(**counts, **{name: numbers[group, name] for name in _SUMS if name not in counts})


def _block_scales(numbers: Mapping[tuple[_Group | None, str | int], torch.Tensor], i: int) -> torch.Tensor | None:
    """Return the counts of block scales, int64 [257], or None if a rank with a part has not counted them."""
    if numbers[None, "scales"][i] != numbers[None, "made"][i]:
        return None
    return torch.stack([numbers[None, at][i] for at in range(CODES + 1)]).long()


def _begins(lengths: Array) -> Array:
    return np.cumsum(lengths) - lengths


def _floats(bits: Array) -> Array:
    """Return the float32 numbers with these bits, or NaN for numbers that no rank has."""
    return np.where(bits == NONE, np.float32(np.nan), np.ascontiguousarray(bits).view(np.float32))

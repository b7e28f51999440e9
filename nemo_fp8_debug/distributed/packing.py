"""Operand statistics as arrays that add up over ranks element by element, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from ..measurement.operand_stats import BLOCK_SCALES, OperandStats
from ..measurement.reduced_gradients import GradientParts
from ..measurement.replicas import Checksums
from ..measurement.verification import ProductsFound
from ..numerics.block_scale_counts import CODES
from ..numerics.histogram import BINS
from ..numerics.metrics import Moments, QuantizationSums

#: bins of a histogram that are sent together: a binade of bfloat16, an eighth of one of float16
BINADE = 128
BINADES = BINS // BINADE
#: less than any number whose maximum is sought
NONE = torch.iinfo(torch.int32).min
#: what the maximum is taken of, for each operand; a minimum is that of the negated number, and floats that are not negative
#: are ordered as their bits are; `further` is how many sums there are beside those of all operands
EXTREMES = ("amax", "scale_max", "amin", "scale_min", "order", "cast", "dtype_max", "dtype_min", "further")
_MOMENTS = ("n", "nan", "inf", "sum_x2", "sum_x4")
_SUMS = tuple(f.name for f in fields(QuantizationSums))
_DTYPES = ("bfloat16", "float16", "float32")


def _columns(what_if: Sequence[str]) -> list[str]:
    """What is added up of each operand beside its counts."""
    sums = [p + name for p in ("", *recipes_of(what_if)) for name in ("measured", *_SUMS)]
    scales = [f"{BLOCK_SCALES}{i}" for i in range(CODES + 2)] if BLOCK_SCALES in what_if else []
    return ["expected", "made", "calls", *_MOMENTS, *sums, *scales]


def recipes_of(what_if: Sequence[str]) -> list[str]:
    """Names of what is measured by sums."""
    return [name for name in what_if if name != BLOCK_SCALES]


class PackedStats:
    """What a rank has to add: M operands of the K that its family knows."""

    def __init__(
        self,
        stats: Sequence[OperandStats],
        casts: Sequence[int],
        rows: Sequence[int],
        expected: Collection[int],
        known: int,
        what_if: Sequence[str],
        outputs: torch.Tensor,
        products: ProductsFound | None = None,
        gradients: Mapping[str, GradientParts] | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        """
        Args:
            casts: a number that stands for the cast of each stat on all ranks.
            rows: which of the K each stat is of.
            expected: which the rank was to have.
            known: K.
            what_if: names of the what-if recipes.
            outputs: float64, sums over parts of outputs, which are added up as they are.
            products: as `verification.FOUND`.
            gradients: by layer.
            checksums: of copies that other ranks may have.
        """
        self.outputs, self.products, self.checksums = outputs, products or {}, checksums or {}
        self.gradients = gradients or {}
        self.rows = torch.tensor(rows, dtype=torch.int64)
        #: by row, float64: sums beside those of all operands
        self.further = {row: s.further for row, s in zip(rows, stats, strict=True) if s.further is not None}
        binades = [s.histogram.counts.view(BINADES, BINADE) for s in stats]
        #: bool [M, 256]: which binades of each histogram are occupied
        self.occupied = torch.zeros(len(stats), BINADES, dtype=torch.bool)
        for occupied, found in zip(self.occupied, binades, strict=True):
            occupied[:] = found.amax(1) > 0
        #: int64 [occupied, 128]
        self.counts = torch.zeros(0, BINADE, dtype=torch.int64)
        if stats:
            self.counts = torch.cat([b[o] for b, o in zip(binades, self.occupied, strict=True)])
        #: int32 [K, 9 + 256]
        self.extremes = torch.full((known, len(EXTREMES) + BINADES), NONE, dtype=torch.int32)
        self.extremes[:, len(EXTREMES) :] = 0
        self.extremes[self.rows] = torch.cat([_extremes(stats, casts), self.occupied.int()], 1)
        #: float64 [K, columns]
        self.numbers = torch.zeros(known, len(_columns(what_if)), dtype=torch.float64)
        self.numbers[self.rows] = _numbers(stats, what_if)
        self.numbers[sorted(expected), 0] = 1.0


def _extremes(stats: Sequence[OperandStats], casts: Sequence[int]) -> torch.Tensor:
    """int32 [M, 9]"""
    absent = (np.nan, np.nan)
    amin = [s.moments.amin.item() if s.moments else np.nan for s in stats]
    scales = [s.scales or absent for s in stats]
    floats = [(s.amax, high, least, low) for s, least, (low, high) in zip(stats, amin, scales, strict=True)]
    values = np.array(floats, dtype=np.float32).reshape(-1, 4)
    bits = np.where(np.isnan(values), NONE, values.view(np.int32) * np.array([1, 1, -1, -1], dtype=np.int32))
    orders = [NONE if s.nonfinite_order is None else -s.nonfinite_order for s in stats]
    dtypes = [_DTYPES.index(s.cast.dtype) for s in stats]
    further = [0 if s.further is None else len(s.further) for s in stats]
    rest = np.array([orders, casts, dtypes, [-d for d in dtypes], further], dtype=np.int32)
    return torch.from_numpy(np.concatenate([bits, rest.T], 1).astype(np.int32))


def _numbers(stats: Sequence[OperandStats], what_if: Sequence[str]) -> torch.Tensor:
    """float64 [M, columns]"""
    columns = {name: torch.zeros(len(stats), dtype=torch.float64) for name in _columns(what_if)}
    columns["expected"] += 1
    columns["made"] += 1
    columns["calls"] = torch.tensor([s.calls for s in stats], dtype=torch.float64)
    if chosen := [i for i, s in enumerate(stats) if s.moments]:
        moments = Moments.concat([m for s in stats if (m := s.moments)])
        for name in _MOMENTS:
            columns[name][chosen] = getattr(moments, name).double()
    if BLOCK_SCALES in what_if:
        for i, stat in enumerate(stats):
            if stat.block_scales is not None:
                for at, count in enumerate([*stat.block_scales.tolist(), 1]):
                    columns[f"{BLOCK_SCALES}{at}"][i] = count
    for prefix in ("", *recipes_of(what_if)):
        rows = [s.what_if.get(prefix) if prefix else s.sums for s in stats]
        if chosen := [i for i, row in enumerate(rows) if row]:
            sums = QuantizationSums.concat([row for row in rows if row])
            columns[f"{prefix}measured"][chosen] = 1.0
            for name in _SUMS:
                columns[prefix + name][chosen] = getattr(sums, name).double()
    return torch.stack(list(columns.values()), 1)


class Layout:
    """Where everything lies in the buffer of sums: a row of numbers for each of S operands, further sums of some, and the
    occupied binades of all."""

    def __init__(self, seen: torch.Tensor, occupied: torch.Tensor, what_if: Sequence[str], further: Sequence[int]) -> None:
        """
        Args:
            seen: int64 [S], which operands any rank has, ascending.
            occupied: bool [S, 256], by anyone.
            further: how many sums each has beside those of all.
        """
        self._seen, self._occupied, self._columns = seen, occupied, _columns(what_if)
        self._further, self._table = list(further), len(seen) * len(self._columns)
        self._numbers = self._table + sum(self._further)
        #: places in the order of binades, of each operand its own
        self._lengths = occupied.sum(1).tolist()
        self._size = self._numbers + sum(self._lengths) * BINADE

    def packed(self, packed: PackedStats) -> torch.Tensor:
        """float64: what this rank adds."""
        buffer = torch.zeros(self._size, dtype=torch.float64)
        buffer[: self._table] = packed.numbers[self._seen].flatten()
        for row, part in zip(self._seen.tolist(), buffer[self._table : self._numbers].split(self._further), strict=True):
            if (mine := packed.further.get(row)) is not None:
                part[: len(mine)] = mine
        place = (self._occupied.flatten().cumsum(0) - 1).view_as(self._occupied)
        mine = place[torch.searchsorted(self._seen, packed.rows)][packed.occupied]
        buffer[self._numbers :].view(-1, BINADE)[mine] = packed.counts.double()
        return buffer

    def unpacked(self, buffer: torch.Tensor, what_if: Sequence[str]) -> SummedStats:
        """The sums of all ranks."""
        table = buffer[: self._table].view(-1, len(self._columns))
        further = [part if len(part) else None for part in buffer[self._table : self._numbers].split(self._further)]
        numbers = dict(zip(self._columns, table.T, strict=True))
        counts = []
        for occupied, found in zip(
            self._occupied, buffer[self._numbers :].view(-1, BINADE).split(self._lengths), strict=True
        ):
            dense = torch.zeros(BINADES, BINADE, dtype=torch.int64)
            dense[occupied] = found.long()
            counts.append(dense.flatten())
        sums = {prefix: _sums(numbers, prefix) for prefix in ("", *recipes_of(what_if))}
        whole = {p: (numbers[f"{p}measured"] == numbers["made"]).tolist() for p in sums}
        return SummedStats(numbers, counts, sums, whole, further)


@dataclass(frozen=True)
class SummedStats:
    """The sums of S operands over all ranks."""

    #: float64 [S] each
    numbers: Mapping[str, torch.Tensor]
    #: int64 [32768] each
    counts: Sequence[torch.Tensor]
    #: under the scales in use, by "", and under what-if recipes, by their names
    sums: Mapping[str, QuantizationSums]
    #: whether those are sums of all ranks that have a shard
    whole: Mapping[str, Sequence[bool]]
    #: float64, sums beside those
    further: Sequence[torch.Tensor | None]

    def sums_of(self, i: int, name: str = "") -> QuantizationSums | None:
        """One row; None where a rank that has a stat has no sums."""
        return self.sums[name].row(i) if self.whole[name][i] else None

    def block_scales_of(self, i: int) -> torch.Tensor | None:
        """int64 [257]; None where a rank that has a stat has counted none."""
        if self.numbers.get(f"{BLOCK_SCALES}{CODES + 1}", torch.zeros(i + 1))[i] != self.numbers["made"][i]:
            return None
        return torch.stack([self.numbers[f"{BLOCK_SCALES}{at}"][i] for at in range(CODES + 1)]).long()

    def moments(self, amax: torch.Tensor, amin: torch.Tensor) -> Moments:
        """Of float32 operands; the median is that of the histogram.

        Args:
            amax, amin: float32 [S].
        """
        counts = {name: self.numbers[name].long() for name in ("n", "nan", "inf")}
        powers = {name: self.numbers[name] for name in ("sum_x2", "sum_x4")}
        return Moments(amax=amax.double(), amin=amin.double(), median=torch.full_like(amax, torch.nan), **counts, **powers)


def _sums(numbers: Mapping[str, torch.Tensor], prefix: str) -> QuantizationSums:
    counts = {name: numbers[prefix + name].long() for name in ("underflows", "overflows")}
    return QuantizationSums(**counts, **{name: numbers[prefix + name] for name in _SUMS if name not in counts})

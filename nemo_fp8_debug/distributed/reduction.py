"""The one packed reduction of a sampled step: shards of a family's ranks -> shards of whole tensors, on its first rank.

Two collectives, however many tensors there are. The first, a maximum, finds what no rank knows alone: extremes, and which
binades of each sketch are occupied by anyone. The second adds up those binades and all sums, in float64, which holds every
count below 2^53: integers come out exactly, whatever the order of the ranks.

Both go through gloo between host memories: no GPU waits for them, and a rank that is gone costs a timeout, not the run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from ..numerics.figures import Moments, QuantizationSums
from ..numerics.history import Key
from ..numerics.scaling import ROLES
from ..numerics.sketch import BINS, Sketch
from ..shards import Cast, Shard
from .family import Family
from .ranks import Ranks

#: bins of a sketch that are sent together: a binade of bfloat16, an eighth of one of float16
BINADE = 128
_BINADES = BINS // BINADE
#: less than any number whose maximum is sought
_NONE = torch.iinfo(torch.int32).min
_DTYPES = ("bfloat16", "float16", "float32")
#: what the maximum is taken of, for each operand; a minimum is that of the negated number, and floats that are not negative
#: are ordered as their bits are
_EXTREMES = ("amax", "amin", "scale_max", "scale_min", "order", "cast", "dtype_max", "dtype_min")
_MOMENTS = ("n", "nan", "inf", "sum_x2", "sum_x4")
_SUMS = tuple(f.name for f in fields(QuantizationSums))
_COUNTS = ("expected", "made", "calls", "measured")


class Mismatch(RuntimeError):
    """Ranks are not at the same step, or do not look at the same: they have come apart."""


@dataclass(frozen=True)
class Plan:
    """What all ranks have to agree on before they add up."""

    step: int
    #: names of the recipes that are weighed
    weighed: Sequence[str]

    def checksum(self) -> int:
        """31 bits."""
        return zlib.crc32(json.dumps([self.step, *self.weighed]).encode()) >> 1


class Reduction:
    """Reduces over the ranks of a family."""

    def __init__(self, ranks: Ranks, family: Family) -> None:
        self._ranks, self._family = ranks, family
        self.keys: list[Key] = [(name, role) for name in family.kinds for role in ROLES]
        self._index = {key: i for i, key in enumerate(self.keys)}
        self._casts: dict[int, Cast] = {}

    def reduce(
        self, plan: Plan, shards: Sequence[Shard], expected: Collection[Key]
    ) -> tuple[list[Shard] | None, dict[Key, float]]:
        """The shards of whole tensors, on the first rank of the family, and on all ranks the amax of each that was seen.

        Args:
            shards: what this rank has.
            expected: what it should have.

        Raises:
            Mismatch: another rank is at another step.
            RuntimeError: another rank does not take part within the timeout.
        """
        mine = {self._index[s.key]: s for s in shards}
        extremes = self._extremes(plan, mine)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self._family.group)
        self._check(plan, extremes[:2])
        table = extremes[2:].view(len(self.keys), -1)
        numbers, occupied = table[:, : len(_EXTREMES)], table[:, len(_EXTREMES) :] > 0
        column = dict(zip(_EXTREMES, numbers.T, strict=True))
        seen = column["cast"] != _NONE
        packed = _Packed(seen, occupied[seen], plan.weighed)
        buffer = packed.of(mine, {self._index[key] for key in expected})
        head = self._family.ranks[0]
        dist.reduce(buffer, head, dist.ReduceOp.SUM, self._family.group)
        amax = _floats(column["amax"])
        seen_at = seen.nonzero().flatten().tolist()
        whole = self._whole(packed, buffer, column, seen_at) if self._ranks.rank == head else None
        return whole, {self.keys[i]: float(amax[i]) for i in seen_at}

    def _extremes(self, plan: Plan, mine: Mapping[int, Shard]) -> torch.Tensor:
        """int32: a checksum of the plan and its negative, then a row for each operand."""
        table = torch.full((len(self.keys), len(_EXTREMES) + _BINADES), _NONE, dtype=torch.int32)
        table[:, len(_EXTREMES) :] = 0
        for i, shard in mine.items():
            table[i, : len(_EXTREMES)] = torch.tensor(self._numbers(shard), dtype=torch.int32)
            table[i, len(_EXTREMES) :] = _binades(shard.sketch).any(1)
        checksum = plan.checksum()
        return torch.cat([torch.tensor([checksum, -checksum], dtype=torch.int32), table.flatten()])

    def _numbers(self, shard: Shard) -> list[int]:
        low, high = shard.scales or (None, None)
        amin = float(shard.moments.amin) if shard.moments else None
        order, dtype = shard.nonfinite_order, _DTYPES.index(shard.cast.dtype)
        return [
            _bits(shard.amax),
            _NONE if amin is None or amin != amin else -_bits(amin),
            _NONE if high is None else _bits(high),
            _NONE if low is None else -_bits(low),
            _NONE if order is None else -order,
            self._number_of(shard.cast),
            dtype,
            -dtype,
        ]

    def _number_of(self, cast: Cast) -> int:
        """31 bits that stand for it on all ranks."""
        text = json.dumps(vars(cast))
        number = zlib.crc32(text.encode()) >> 1
        if number not in self._casts:
            self._casts[number] = cast
            self._ranks.first_to_say(f"cast/{number}", vars(cast))
        return number

    def _cast_of(self, number: int) -> Cast:
        if number not in self._casts:
            self._casts[number] = Cast(**self._ranks.read(f"cast/{number}"))
        return self._casts[number]

    def _check(self, plan: Plan, checksums: torch.Tensor) -> None:
        high, low = checksums.tolist()
        if high != -low:
            raise Mismatch(f"ranks do not agree on what is sampled at step {plan.step}")

    def _whole(
        self, packed: _Packed, buffer: torch.Tensor, column: Mapping[str, torch.Tensor], seen: Sequence[int]
    ) -> list[Shard]:
        amax, amin = _floats(column["amax"]), _floats(-column["amin"])
        highest, lowest = _floats(column["scale_max"]), _floats(-column["scale_min"])
        shards = []
        for row, i in enumerate(seen):
            if column["dtype_max"][i] != -column["dtype_min"][i]:
                continue  # counts of different formats do not add up
            key, cast = self.keys[i], self._cast_of(int(column["cast"][i]))
            got = packed.row(buffer, row)
            order, has_amin = int(column["order"][i]), int(column["amin"][i]) != _NONE
            scales = (float(lowest[i]), float(highest[i])) if int(column["scale_max"][i]) != _NONE else None
            rounded = cast.dtype == "float32"
            sketch = Sketch(torch.float16 if cast.dtype == "float16" else torch.bfloat16, got.counts, rounded)
            one_scale = scales[0] if scales and scales[0] == scales[1] else None
            shards.append(
                Shard(
                    key=key,
                    kind=self._family.kinds[key[0]],
                    cast=cast,
                    sketch=sketch,
                    amax=float(amax[i]),
                    moments=_moments(got.numbers, amax[i], amin[i] if has_amin else None) if rounded else None,
                    sums=_sums(got.numbers, "") if got.has_sums("") else None,
                    weighed={name: _sums(got.numbers, name) for name in packed.weighed if got.has_sums(name)},
                    scales=scales,
                    parts=[(cast, one_scale, sketch)],
                    calls=int(got.numbers["calls"]),
                    nonfinite_order=None if order == _NONE else -order,
                    shards=int(got.numbers["made"]),
                    missing=int(got.numbers["expected"] - got.numbers["made"]),
                )
            )
        return shards


@dataclass(frozen=True)
class _Row:
    numbers: Mapping[str, float]
    #: int64 [32768]
    counts: torch.Tensor

    def has_sums(self, prefix: str) -> bool:
        """Whether they are those of all ranks that have a shard."""
        return 0 < self.numbers["made"] == self.numbers[f"{prefix}measured"]


class _Packed:
    """Where everything lies in the buffer of sums: a row of numbers for each operand seen, then its occupied binades."""

    def __init__(self, seen: torch.Tensor, occupied: torch.Tensor, weighed: Sequence[str]) -> None:
        """
        Args:
            seen: bool [K].
            occupied: bool [S, 256], of those that were seen.
        """
        self.weighed = list(weighed)
        self._columns = [*_COUNTS, *_MOMENTS, *_SUMS]
        self._columns += [f"{name}{column}" for name in self.weighed for column in ("measured", *_SUMS)]
        self._row_of = {key: row for row, key in enumerate(seen.nonzero().flatten().tolist())}
        self._occupied = occupied
        ends = occupied.sum(1).cumsum(0) * BINADE + len(self._row_of) * len(self._columns)
        self._start = [len(self._row_of) * len(self._columns), *ends.tolist()]

    def of(self, mine: Mapping[int, Shard], expected: Collection[int]) -> torch.Tensor:
        """float64: what this rank adds."""
        buffer = torch.zeros(self._start[-1], dtype=torch.float64)
        numbers = buffer[: self._start[0]].view(len(self._row_of), len(self._columns))
        for i, row in self._row_of.items():
            numbers[row, 0] = float(i in expected or i in mine)
            if i in mine:
                found = _numbers_of(mine[i])
                numbers[row, 1:] = torch.tensor([found.get(name, 0.0) for name in self._columns[1:]], dtype=torch.float64)
                binades = _binades(mine[i].sketch)[self._occupied[row]]
                buffer[self._start[row] : self._start[row + 1]] = binades.flatten().double()
        return buffer

    def row(self, buffer: torch.Tensor, row: int) -> _Row:
        """What is known of an operand."""
        width = len(self._columns)
        numbers = dict(zip(self._columns, buffer[row * width : (row + 1) * width].tolist(), strict=True))
        counts = torch.zeros(_BINADES, BINADE, dtype=torch.int64)
        counts[self._occupied[row]] = buffer[self._start[row] : self._start[row + 1]].view(-1, BINADE).long()
        return _Row(numbers, counts.flatten())


def _numbers_of(shard: Shard) -> dict[str, float]:
    found = {"made": 1.0, "calls": float(shard.calls)}
    if shard.moments:
        found |= {name: float(getattr(shard.moments, name)) for name in _MOMENTS}
    for prefix, sums in (("", shard.sums), *shard.weighed.items()):
        if sums:
            found |= {f"{prefix}measured": 1.0} | {prefix + name: float(getattr(sums, name)) for name in _SUMS}
    return found


def _sums(numbers: Mapping[str, float], prefix: str) -> QuantizationSums:
    """One row."""
    counts = {name: torch.tensor([int(numbers[prefix + name])]) for name in ("underflows", "overflows")}
    sums = {name: torch.tensor([numbers[prefix + name]], dtype=torch.float64) for name in _SUMS if name not in counts}
    return QuantizationSums(**counts, **sums)


def _moments(numbers: Mapping[str, float], amax: torch.Tensor, amin: torch.Tensor | None) -> Moments:
    """One row, of a float32 operand; the median is that of the sketch."""
    absent = torch.tensor([torch.nan], dtype=torch.float64)
    counts = {name: torch.tensor([int(numbers[name])]) for name in ("n", "nan", "inf")}
    sums = {name: torch.tensor([numbers[name]], dtype=torch.float64) for name in ("sum_x2", "sum_x4")}
    least = absent if amin is None else amin.double()[None]
    return Moments(amax=amax.double()[None], amin=least, median=absent, **counts, **sums)


def _binades(sketch: Sketch) -> torch.Tensor:
    """int64 [256, 128]"""
    return sketch.counts.view(_BINADES, BINADE)


def _bits(value: float) -> int:
    """The bits of a float32 that is not negative: ordered as the numbers are."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """float32, from their bits."""
    return bits.contiguous().view(torch.float32)

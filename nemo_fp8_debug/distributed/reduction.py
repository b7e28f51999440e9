"""The one packed reduction of a sampled step: stats of a shard group's ranks -> stats of whole tensors, on its first rank.

Two collectives, however many tensors there are. The first, a maximum, finds what no rank knows alone: extremes, and which
binades of each histogram are occupied by anyone. The second adds up those binades and all sums, in float64, which holds
every count below 2^53: integers come out exactly, whatever the order of the ranks.

Both go through gloo between host memories: no GPU waits for them, and a rank that is gone costs a timeout, not the run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..capture.output_samples import Chosen
from ..core.keys import ATTENTION, ROLES, Key, roles_of
from ..measurement.operand_stats import Cast, Collected, OperandStats, OutputSums
from ..numerics.gemm_error import PRODUCTS, SUMS
from ..numerics.histogram import Histogram
from .gradient_sums import GradientSums
from .packing import EXTREMES, NONE, Layout, PackedStats, SummedStats, recipes_of
from .rank_store import Ranks
from .replicas import ReplicaComparison
from .shard_group import ShardGroup
from .worst_products import WorstProducts


class Mismatch(RuntimeError):
    """Ranks are not at the same step, or do not look at the same: they are out of sync."""


@dataclass(frozen=True)
class Plan:
    """What all ranks have to agree on before they add up."""

    step: int
    #: names of what is measured beside what is in use: recipes that are tried, and copies
    what_if: Sequence[str]

    def checksum(self) -> int:
        """31 bits."""
        return zlib.crc32(json.dumps([self.step, *self.what_if]).encode()) >> 1


class Reduction:
    """Reduces over the ranks of a shard group."""

    def __init__(self, ranks: Ranks, shard_group: ShardGroup, chosen: Chosen, parts: Mapping[str, int]) -> None:
        """
        Args:
            chosen: what is added up beside operands; the same on all ranks.
            parts: of tensors whose copies are compared, by what; the same on all ranks.
        """
        self._ranks, self._shard_group = ranks, shard_group
        gemms = [name for name, kind in shard_group.kinds.items() if roles_of(kind) == ROLES]
        products = [(name, product) for name in gemms for product in PRODUCTS]
        self._products = products if chosen.errors else []
        self._verified = WorstProducts(products if chosen.verify else [], ranks.rank)
        self._gradients = GradientSums(gemms if chosen.verify else [], parts["weight_gradient"], ranks.rank)
        self._copies = ReplicaComparison(gemms if chosen.replicas else [], parts, ranks.rank)
        states = [(name, role) for name in gemms for role in chosen.states]
        self.keys: list[Key] = [*shard_group.keys(), *states, *shard_group.activations]
        self._index = {key: i for i, key in enumerate(self.keys)}
        self._casts: dict[int, Cast] = {}
        self._numbers: dict[Cast, int] = {}
        #: operands of the last sample that were left out, since ranks have them in different dtypes
        self.mixed: list[Key] = []

    def pack(self, plan: Plan, found: Collected, expected: Collection[Key]) -> PackedStats:
        """What this rank has to add; keeps nothing of what it found.

        Args:
            expected: what it should have.
        """
        stats, outputs = found.operands, self._outputs_of(found.outputs)
        rows, casts = [self._index[s.key] for s in stats], [self._number_of(s.cast) for s in stats]
        known = [self._index[key] for key in expected]
        verified = found.products, found.gradients
        return PackedStats(stats, casts, rows, known, len(self.keys), plan.what_if, outputs, *verified, found.checksums)

    def alone(self, found: Collected) -> Collected:
        """What is known of products, gradients and masters where no other rank has parts of them."""
        products = self._verified.alone(found.products) | self._gradients.of_all(self._gradients.rows(found.gradients))
        extremes = self._copies.extremes(found.checksums)
        copies = self._copies.of_all(self._copies.rows(found.checksums, extremes).flatten(), extremes)
        return replace(found, products=products, replicas={key: of for key, of in copies.items() if of.ranks})

    def _outputs_of(self, found: OutputSums) -> torch.Tensor:
        """float64 [products, 6], zeros where this rank has none."""
        none = torch.zeros(len(SUMS) + 1, dtype=torch.float64)
        return torch.stack([found.get(key, none) for key in self._products]) if self._products else none[:0]

    def reduce(self, plan: Plan, packed: PackedStats) -> tuple[Collected | None, dict[Key, float]]:
        """What is known of whole tensors, on the first rank of the group, and on all ranks the amax of each that was seen.

        Raises:
            Mismatch: another rank is at another step.
            RuntimeError: another rank does not take part within the timeout.
        """
        group, checksum = self._shard_group.group, plan.checksum()
        assert group is not None
        severities, copies = self._verified.severities(packed.products), self._copies.extremes(packed.checksums)
        plans = torch.tensor([checksum, -checksum], dtype=torch.int32)
        extremes = torch.cat([plans, severities, copies, packed.extremes.flatten()])
        group.maximum(extremes)
        if extremes[0] != -extremes[1]:
            raise Mismatch(f"ranks do not agree on what is sampled at step {plan.step}")
        worst, copies, flat = extremes[2:].split([len(severities), len(copies), packed.extremes.numel()])
        table = flat.view(len(self.keys), -1)
        seen = (table[:, EXTREMES.index("cast")] != NONE).nonzero().flatten()
        table = table[seen]
        column = dict(zip(EXTREMES, table[:, : len(EXTREMES)].T, strict=True))
        layout = Layout(seen, table[:, len(EXTREMES) :] > 0, plan.what_if, column["further"].tolist())
        of_products = self._verified.rows(packed.products, worst), self._copies.rows(packed.checksums, copies)
        of_gradients = self._gradients.rows(packed.gradients)
        beside = [packed.outputs.flatten(), *(rows.flatten() for rows in (*of_products, of_gradients))]
        buffer = torch.cat([layout.packed(packed), *beside])
        group.add_up(buffer)
        buffer, outputs, products, equal, gradients = buffer.split([len(buffer) - sum(map(len, beside)), *map(len, beside)])
        keys = [self.keys[i] for i in seen.tolist()]
        amax = dict(zip(keys, _floats(column["amax"]).tolist(), strict=True))
        if self._ranks.rank != self._shard_group.ranks[0]:
            return None, amax
        parts = zip(self._products, outputs.view(-1, len(SUMS) + 1), strict=True)
        whole = self._whole(keys, column, layout.unpacked(buffer, plan.what_if), plan)
        sums = {key: of for key, of in parts if of[-1] > 0}
        verified = self._verified.of_all(products) | self._gradients.of_all(gradients)
        return Collected(whole, sums, verified, replicas=self._copies.of_all(equal, copies)), amax

    def _number_of(self, cast: Cast) -> int:
        """31 bits that stand for it on all ranks."""
        if cast not in self._numbers:
            number = zlib.crc32(json.dumps(vars(cast)).encode()) >> 1
            self._ranks.set_if_absent(f"cast/{number}", vars(cast))
            self._numbers[cast], self._casts[number] = number, cast
        return self._numbers[cast]

    def _cast_of(self, number: int) -> Cast:
        if number not in self._casts:
            self._casts[number] = Cast(**self._ranks.read(f"cast/{number}"))
        return self._casts[number]

    def _kind_of(self, key: Key) -> str:
        group = self._shard_group
        return group.activations.get(key) or group.kinds[key[0]].removeprefix(ATTENTION)

    def _whole(
        self, keys: Sequence[Key], column: Mapping[str, torch.Tensor], added: SummedStats, plan: Plan
    ) -> list[OperandStats]:
        amax, high = _floats(column["amax"]), _floats(column["scale_max"])
        amin, low = _floats(-column["amin"]), _floats(-column["scale_min"])
        moments = added.moments(amax, amin)
        made, calls, expected = (added.numbers[name].long().tolist() for name in ("made", "calls", "expected"))
        numbers = {name: values.tolist() for name, values in column.items()}
        stats, self.mixed = [], []
        for i, (key, top, lowest, highest) in enumerate(zip(keys, amax.tolist(), low.tolist(), high.tolist(), strict=True)):
            if numbers["dtype_max"][i] != -numbers["dtype_min"][i]:
                self.mixed.append(key)  # counts of different formats do not add up
                continue
            cast, order = self._cast_of(numbers["cast"][i]), numbers["order"][i]
            rounded = cast.dtype == "float32"
            histogram = Histogram(torch.float16 if cast.dtype == "float16" else torch.bfloat16, added.counts[i], rounded)
            scales = (lowest, highest) if lowest == lowest else None
            stats.append(
                OperandStats(
                    key=key,
                    kind=self._kind_of(key),
                    cast=cast,
                    histogram=histogram,
                    amax=top,
                    moments=moments.row(i) if rounded else None,
                    sums=added.sums_of(i),
                    what_if={name: sums for name in recipes_of(plan.what_if) if (sums := added.sums_of(i, name))},
                    scales=scales,
                    parts=[(cast, lowest if lowest == highest else None, histogram)],
                    block_scales=added.block_scales_of(i),
                    further=added.further[i],
                    calls=calls[i],
                    nonfinite_order=None if order == NONE else -order,
                    ranks=made[i],
                    missing=expected[i] - made[i],
                )
            )
        return stats


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """float32, from their bits; NaN where nobody knew any."""
    return torch.where(bits == NONE, torch.nan, bits.contiguous().view(torch.float32))

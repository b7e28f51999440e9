"""The reduction of a sampled step: combine the statistics of all ranks of a shard group.

The reduction always takes two collectives, independent of the amount of data. The first computes a maximum, which yields
extremes and the occupied binades of each histogram. The second adds up the counts of these binades, and all other sums, in
float64. float64 represents integers below 2^53 exactly, so counts are exact in any order of the ranks.

Both collectives use gloo in host memory. So no GPU waits, and if a rank is gone, the collective times out and the run
continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..core.keys import Key
from ..core.observation import AgreedSampleSettings, Arrays, FeatureObservation
from ..core.plain_arrays import decode_arrays, encode_arrays
from .rank_store import MonitoredRanks
from .shard_group import ShardGroup

#: separator between the names of an observation and an array
_MARK = "/"


class Mismatch(RuntimeError):
    """Ranks are out of sync: they are at different steps, or observe different tensors."""


class ShardGroupReduction:
    """Combines results over the ranks of a shard group."""

    def __init__(self, ranks: MonitoredRanks, shard_group: ShardGroup, observations: Sequence[FeatureObservation]) -> None:
        """
        Args:
            observations: the same on all ranks, in the same order.
        """
        self._ranks, self._shard_group, self._observations = ranks, shard_group, list(observations)

    def pack_results(self, plan: AgreedSampleSettings, found: Mapping[str, Any], expected: Collection[Key]) -> bytes:
        """Pack this rank's results as plain bytes, without references to tensors.

        Args:
            found: results by observation.
            expected: operands that this rank should have observed.
        """
        packed = {one.name: one.pack_results(plan, found.get(one.name), expected) for one in self._observations}
        return encode_arrays({f"{name}{_MARK}{key}": x for name, arrays in packed.items() for key, x in arrays.items()})

    def compute_single_rank_results(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results by observation without a reduction, if no other rank has parts of the tensors."""
        return {one.name: one.compute_single_rank_result(found[one.name]) for one in self._observations if one.name in found}

    def reduce_over_ranks(self, plan: AgreedSampleSettings, packed: bytes) -> dict[str, Any] | None:
        """On the first rank of the group, return the combined results of all ranks by observation. On other ranks, return
        None.

        Raises:
            Mismatch: another rank is at another step.
            RuntimeError: another rank does not take part within the timeout.
        """
        group, checksum = self._shard_group.group, plan.checksum()
        assert group is not None
        mine = _by_observation(decode_arrays(packed))
        parts = [one.collect_maxima(mine[one.name]) for one in self._observations]
        extremes = torch.cat([torch.tensor([checksum, -checksum], dtype=torch.int32), *parts])
        group.reduce_maximum(extremes)
        if extremes[0] != -extremes[1]:
            raise Mismatch(f"ranks do not agree on what is sampled at step {plan.step}")
        largest = extremes[2:].split([len(part) for part in parts])
        pairs = list(zip(self._observations, largest, strict=True))
        added = [one.collect_sums(plan, mine[one.name], most) for one, most in pairs]
        places = sorted((lane, i) for i, lanes in enumerate(added) for lane in lanes)
        sums = torch.cat([added[i][lane] for lane, i in places])
        group.reduce_sum(sums)
        if self._ranks.rank != self._shard_group.ranks[0]:
            return None
        of_all: list[dict[int, torch.Tensor]] = [{} for _ in added]
        for (lane, i), part in zip(places, sums.split([len(added[i][lane]) for lane, i in places]), strict=True):
            of_all[i][lane] = part
        return {one.name: one.combine_all_ranks(plan, lanes, most) for (one, most), lanes in zip(pairs, of_all, strict=True)}


def _by_observation(arrays: Arrays) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        observation, _, key = name.partition(_MARK)
        found.setdefault(observation, {})[key] = array
    return found

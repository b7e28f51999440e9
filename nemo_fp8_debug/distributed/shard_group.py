"""Find the ranks that have parts of the same tensors, by the names of their GEMMs. These ranks are usually a pipeline stage.

This does not depend on the framework: ranks that share a GEMM's name belong together, for any kind of parallelism. Experts
may be on some ranks of a shard group only.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.keys import Key, list_roles
from . import patience
from .gloo import GlooGroup
from .rank_store import MonitoredRanks

#: separator between a module's name and a role; no module's name contains it, because the parts of a name are never empty
_MARK = ".."


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that reduce together, and their GEMMs and tensors."""

    #: global ranks, ascending; the first rank computes the metrics for all
    ranks: Sequence[int]
    #: kind of each GEMM and attention module of these ranks, by name, sorted
    kinds: Mapping[str, str]
    #: first rank that has a GEMM, by the GEMM's name
    first: Mapping[str, int]
    #: kind of the module of every other observed tensor, by tensor
    tensors: Mapping[Key, str] = field(default_factory=dict)
    #: gloo group of these ranks, or None if there is only one rank
    group: GlooGroup | None = None
    #: the first ranks of all shard groups, and the rank that writes the record
    leaders: Sequence[int] = (0,)
    leaders_group: GlooGroup | None = None

    def list_operand_keys(self, roles: Collection[str] | None = None) -> list[Key]:
        """Return the operands of these ranks that have one of the given roles, or all operands if `roles` is None."""
        every = [(name, role) for name, kind in self.kinds.items() for role in list_roles(kind)]
        return [key for key in every if roles is None or key[1] in roles]

    @classmethod
    def make_single_rank(cls, rank: int, kinds: Mapping[str, str]) -> ShardGroup:
        """Return the shard group of a rank that shares no tensor with other ranks."""
        gemms, tensors = _parted(dict(sorted(kinds.items())))
        return cls([rank], gemms, dict.fromkeys(gemms, rank), tensors)

    @staticmethod
    def publish_gemm_names(ranks: MonitoredRanks, kinds: Mapping[str, str]) -> None:
        """Publish the names of this rank's GEMMs, before all ranks have started."""
        if ranks.world > 1:
            try:
                ranks.publish_value(f"digest/{ranks.rank}", digest_of(kinds))
                ranks.publish_if_absent(f"kinds/{digest_of(kinds)}", dict(kinds))
                ranks.publish_address()
            except TimeoutError as error:
                ranks.continue_single_rank(error)

    @classmethod
    def find_shard_group(cls, ranks: MonitoredRanks, kinds: Mapping[str, str]) -> ShardGroup:
        """Return the shard group of this rank. All ranks call this after `publish_gemm_names`.

        Raises:
            RuntimeError: the ranks cannot be connected.
        """
        if ranks.world == 1:
            return cls.make_single_rank(ranks.rank, kinds)
        ranks.exchange_addresses()
        if ranks.writes_record:
            _publish(ranks)
        told = ranks.await_value(f"shard-group-of/{digest_of(kinds)}")
        leaders = ranks.await_value("leaders")
        mine = ranks.await_value(f"shard-group/{told}") if told is not None else None
        if mine is None:  # this rank has no GEMM
            mine = {"ranks": [ranks.rank], "kinds": {}, "first": {}}
        gemms, tensors = _parted(mine["kinds"])
        return cls(
            mine["ranks"],
            gemms,
            mine["first"],
            tensors,
            _group(f"shard-group-{told}", ranks, mine["ranks"]),
            leaders,
            _group("leaders", ranks, leaders),
        )


def name_tensor_part(key: Key) -> str:
    """Return the name under which ranks exchange a tensor's part."""
    return _MARK.join(key)


def _parted(kinds: Mapping[str, str]) -> tuple[dict[str, str], dict[Key, str]]:
    """Split the names into GEMMs with attention modules, and other tensors."""
    gemms = {name: kind for name, kind in kinds.items() if _MARK not in name}
    apart = {tuple(name.split(_MARK, 1)): kind for name, kind in kinds.items() if _MARK in name}
    return gemms, {(layer, role): kind for (layer, role), kind in apart.items()}


def digest_of(kinds: Mapping[str, str]) -> str:
    """Return a short name for a set of GEMMs. If several ranks have the same set, they publish it once."""
    return hashlib.sha256(json.dumps(sorted(kinds.items())).encode()).hexdigest()[:16]


def _publish(ranks: MonitoredRanks) -> None:
    """Group ranks that share names, and publish each group. The first rank calls this."""
    digests = ranks.read_values_of_all_ranks("digest")
    owners: dict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        owners[digest].append(rank)
    kinds: dict[str, dict[str, str]] = {digest: ranks.await_value(f"kinds/{digest}") for digest in owners}
    leaders = {0}
    for i, group in enumerate(_shard_groups(kinds)):
        members = sorted(rank for digest in group for rank in owners[digest])
        together = dict(sorted(item for digest in group for item in kinds[digest].items()))
        first = {name: min(owners[digest][0] for digest in group if name in kinds[digest]) for name in together}
        ranks.publish_value(f"shard-group/{i}", {"ranks": members, "kinds": together, "first": first})
        for digest in group:
            ranks.publish_value(f"shard-group-of/{digest}", i)
        leaders.add(members[0])
    for digest in owners:
        if not kinds[digest]:
            ranks.publish_value(f"shard-group-of/{digest}", None)
    ranks.publish_value("leaders", sorted(leaders))


def _shard_groups(kinds: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return groups of digests. Two digests are in a group if their sets share a name, directly or through other sets."""
    group_of: dict[str, set[str]] = {}
    holder: dict[str, str] = {}
    for digest, names in kinds.items():
        mine = {digest}
        for name in names:
            mine |= group_of[holder[name]] if name in holder else set()
            holder[name] = digest
        for member in mine:
            group_of[member] = mine
    found = {id(group): sorted(group) for digest, group in group_of.items() if kinds[digest]}
    return sorted(found.values())


def _group(name: str, ranks: MonitoredRanks, members: Sequence[int]) -> GlooGroup | None:
    if len(members) == 1 or ranks.rank not in members:
        return None
    return ranks.make_gloo_group(name, members, patience.LONGEST)

"""Which tensors this rank counts, and which another one does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..capture.backends.parallel import copied_part
from ..capture.dtensor import is_counted
from ..capture.gemms import Gemm, matching
from ..capture.scales import Scales
from ..capture.stepped import is_split_by_zero, weight_of
from ..core.keys import ROLES, Key, roles_of
from ..distributed import Ranks, ShardGroup
from ..options.config import Config


def counted_parts(gemms: Sequence[Gemm], plan: Config, dumped: Sequence[str], group: ShardGroup, rank: int) -> set[Key]:
    """Operands of which this rank counts a part.

    Args:
        dumped: patterns of layers that are looked at beside those of the plan.
    """
    chosen = matching(gemms, None if plan.layers is None else [*plan.layers, *dumped])
    copied = {(g.name, role): copied_elsewhere(g, role) for g in chosen for role in plan.roles if is_shown(g, role)}
    return {key for key, of in copied.items() if (group.first[key[0]] == rank if of is None else not of)}


def compiled_parts(compiled: Sequence[Gemm], plan: Config, group: ShardGroup) -> set[Key]:
    """What is compiled here and is seen on another rank lacks this one's part."""
    return {
        (gemm.name, role)
        for gemm in matching(compiled, plan.layers)
        for role in plan.roles
        if role != "weight" and gemm.name in group.kinds and not gemm.backend.copied(gemm.module, role)
    }


def copied_elsewhere(gemm: Gemm, role: str) -> bool | None:
    """Whether another rank counts it; None: the first rank that has it does."""
    stored = gemm.backend.stored(gemm.module, gemm.part) if role == "weight" else None
    if stored is not None and getattr(stored.parameter, "main_param_sharded", False):
        return copied_part(gemm.module)
    return gemm.backend.copied(gemm.module, role)


def is_shown(gemm: Gemm, role: str) -> bool:
    """Whether anything shows an operand to hooks."""
    return role not in gemm.unseen


def counts_weight(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Whether this rank counts a tensor that lies as a weight does: a part that no other has, or the first of copies."""
    is_copy, weight = copied_part(gemm.module), weight_of(gemm)
    if getattr(weight, "main_param_sharded", False):
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    if copied:
        return lambda x: False
    # An engine may split states only after the monitor was made.
    return lambda x: not is_copy if is_split_by_zero(weight_of(gemm)) else is_counted(x, rank, first)


@dataclass(frozen=True)
class RunSetup:
    """What is the same for all sampled steps of a run."""

    config: Config
    ranks: Ranks
    shard_group: ShardGroup
    scales: Scales
    #: into how many parts ranks may split a tensor, by what it is
    parts: Mapping[str, int]

    @property
    def gemms(self) -> list[str]:
        """Names of the GEMMs of all ranks that reduce together."""
        return [name for name, kind in self.shard_group.kinds.items() if roles_of(kind) == ROLES]

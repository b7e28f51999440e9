"""What an observation is made of, for the length of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..capture.scales import Scales
from ..core.keys import ROLES, roles_of
from ..distributed import Ranks, ShardGroup
from ..options.config import Config


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

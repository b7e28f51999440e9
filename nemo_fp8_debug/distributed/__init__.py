"""Let the ranks of a run agree, and add up their parts of tensors. Internal."""

from .rank_store import Ranks
from .reduction import Reduction
from .shard_group import ShardGroup

__all__ = ["Ranks", "Reduction", "ShardGroup"]

"""Let the ranks of a run agree on values, and add up their statistics of tensors. Internal."""

from .rank_store import Ranks
from .reduction import Reduction
from .shard_group import ShardGroup

__all__ = ["Ranks", "Reduction", "ShardGroup"]

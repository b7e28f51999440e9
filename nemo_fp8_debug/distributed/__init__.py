"""What the ranks of a run do together: agree, and add up what each of them holds of a tensor. Internal."""

from .rank_store import Ranks
from .reduction import Reduction
from .shard_group import ShardGroup

__all__ = ["Ranks", "Reduction", "ShardGroup"]

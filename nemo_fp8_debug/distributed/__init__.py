"""Let the ranks of a run agree on values, and add up their statistics of tensors. Internal."""

from .rank_store import MonitoredRanks
from .reduction import ShardGroupReduction
from .shard_group import ShardGroup

__all__ = ["MonitoredRanks", "ShardGroup", "ShardGroupReduction"]

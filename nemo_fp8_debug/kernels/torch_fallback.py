"""Counts magnitude patterns with plain torch operations: any device that torch has, the same counts, more slowly."""

from __future__ import annotations

import torch

#: values handled at once; bounds the index that torch needs to 32 MiB
CHUNK = 1 << 22


def count_patterns(values: torch.Tensor, counts: torch.Tensor) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs; no host synchronization.

    Args:
        values: int16 [n], on the device of `counts`.
        counts: int64 [32768], added to in place.
    """
    for chunk in values.split(CHUNK):
        index = chunk.to(torch.int64) & 0x7FFF
        counts.scatter_add_(0, index, torch.ones((), dtype=torch.int64, device=index.device).expand_as(index))

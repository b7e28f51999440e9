"""Counts magnitude patterns with plain torch operations: any device that torch has, the same counts, more slowly."""

from __future__ import annotations

import torch

#: values handled at once; bounds the indices that torch needs to 64 MiB
CHUNK = 1 << 22
#: histograms that neighboring values are counted into in turn: additions to one address wait for one another on a device
LANES = 64


def count_patterns(values: torch.Tensor, counts: torch.Tensor) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs; no host synchronization.

    Args:
        values: int16 [n], on the device of `counts`.
        counts: int64 [32768], added to in place.
    """
    lanes = counts.new_zeros(LANES * len(counts))
    first = torch.arange(min(CHUNK, len(values)), device=counts.device) % LANES * len(counts)
    one = torch.ones((), dtype=torch.int64, device=counts.device)
    for chunk in values.split(CHUNK):
        index = chunk.to(torch.int64).bitwise_and_(0x7FFF).add_(first[: len(chunk)])
        lanes.scatter_add_(0, index, one.expand_as(index))
    counts += lanes.view(LANES, -1).sum(0)

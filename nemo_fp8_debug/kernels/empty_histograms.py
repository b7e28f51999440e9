"""Histograms on a device that nothing has been counted into: many are cleared at once, since each launch costs the host."""

from __future__ import annotations

from collections import defaultdict

import torch

from ..numerics.histogram import BINS
from .streams import current_stream

#: histograms that are cleared at once, 8 MiB
AT_ONCE = 32

#: by device and stream, which has cleared them and which they have to be counted in
_empty: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)


def empty_histogram(device: torch.device) -> torch.Tensor:
    """Zeros, int64 [32768], for torch's current stream."""
    if device.type != "cuda":
        return torch.zeros(BINS, dtype=torch.int64, device=device)
    empty = _empty[device, current_stream(device)]
    try:
        return empty.pop()
    except IndexError:
        with torch.inference_mode(False):  # others of them may be counted into outside of one
            first, *others = torch.zeros(AT_ONCE, BINS, dtype=torch.int64, device=device).unbind()
        empty += others
        return first


def forget_empty_histograms() -> None:
    """Give the memory of those back that nothing was counted into."""
    _empty.clear()

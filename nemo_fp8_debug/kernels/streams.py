"""Torch's current stream on a CUDA device, in a tenth of the time that torch takes to make an object of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """Its handle."""
    handle: int = _raw(device.index) if _raw else torch.cuda.current_stream(device).cuda_stream
    return handle

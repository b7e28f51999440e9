"""What a sampled step left on a device, brought to the host once it is over, off the stream of the training."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from ..kernels.cpu.precompute import precompute
from ..numerics.precomputed import CastRequests
from .packed_transfer import Move, copied_to_host


class Holder(Protocol):
    """Holds tensors until a step is measured."""

    def move(self, to: Move) -> None:
        """Replace each of them by what `to` gives for it."""


class DeviceToHostCopy:
    """Made in the training thread when a step is over, which waits for nothing; the way home is taken in the background."""

    def __init__(self, holders: Sequence[Holder], devices: Collection[torch.device]) -> None:
        """
        Args:
            holders: of tensors, on any device.
            devices: that these are on.
        """
        self._holders = holders
        self._over = {device: _mark(device) for device in set(devices) if device.type == "cuda"}
        self._on_device = any(device.type != "cpu" for device in devices)
        self._done = False

    def wait(self, requests: Callable[[], CastRequests]) -> None:
        """Have all tensors in host memory, once the device has come to the end of the step; nothing more if called again.

        Args:
            requests: of histograms, which is found before they leave a CUDA device, or else on the host.
        """
        if self._done:
            return
        wanted = self._fetch(requests) if self._on_device else []
        precompute([of for of in wanted or requests() if not of[0].precomputed])
        self._done = True

    def _fetch(self, requests: Callable[[], CastRequests]) -> CastRequests:
        """What is away; gives what was asked of a CUDA device."""
        home: dict[int, torch.Tensor] = {}
        with contextlib.ExitStack() as streams:
            for device, over in self._over.items():
                streams.enter_context(torch.cuda.stream(_stream(device)))
                _stream(device).wait_event(over)
            wanted = requests() if self._over else ()
            for device, tensors in _by_device(self._holders).items():
                found = copied_to_host(tensors, _to_host, wanted if device in self._over else ())
                home |= zip(map(id, tensors), found, strict=True)
        for holder in self._holders:
            holder.move(lambda x: home.get(id(x), x))
        return wanted


def _mark(device: torch.device) -> torch.cuda.Event:
    with torch.cuda.device(device):
        over = torch.cuda.Event()
        over.record()
    return over


def _by_device(holders: Sequence[Holder]) -> dict[torch.device, list[torch.Tensor]]:
    """The tensors that are not in host memory, each once."""
    found: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            found[x.device][id(x)] = x
        return x

    for holder in holders:
        holder.move(note)
    return {device: list(tensors.values()) for device, tensors in found.items()}


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for good: torch keeps what was freed in a stream for that stream."""
    return torch.cuda.Stream(device)


def _to_host(away: torch.Tensor) -> torch.Tensor:
    if away.device.type != "cuda":
        return away.cpu()
    pinned = torch.empty(away.shape, dtype=away.dtype, pin_memory=True)
    pinned.copy_(away, non_blocking=True)
    torch.cuda.current_stream(away.device).synchronize()
    return pinned

"""What a sampled step left on a device, brought to the host once it is over, off the stream of the training."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

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

    def wait(self) -> None:
        """Have all tensors in host memory, once the device has come to the end of the step; nothing more if called again."""
        if self._on_device and not self._done:
            self._fetch()
        self._done = True

    def _fetch(self) -> None:
        home: dict[int, torch.Tensor] = {}
        with contextlib.ExitStack() as streams:
            for device, over in self._over.items():
                streams.enter_context(torch.cuda.stream(_stream(device)))
                _stream(device).wait_event(over)
            for tensors in _by_device(self._holders):
                home |= zip(map(id, tensors), copied_to_host(tensors, _to_host), strict=True)
        for holder in self._holders:
            holder.move(lambda x: home.get(id(x), x))


def _mark(device: torch.device) -> torch.cuda.Event:
    with torch.cuda.device(device):
        over = torch.cuda.Event()
        over.record()
    return over


def _by_device(holders: Sequence[Holder]) -> list[list[torch.Tensor]]:
    """The tensors that are not in host memory, each once, a list for each device."""
    found: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            found[x.device][id(x)] = x
        return x

    for holder in holders:
        holder.move(note)
    return [list(tensors.values()) for tensors in found.values()]


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

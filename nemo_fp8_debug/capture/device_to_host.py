"""Copy the tensors of a sampled step from devices to the host after the step, in a stream that the training does not use.

One copy transfers all tensors of a device. Of each histogram, we copy only the occupied bins.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ..numerics.histogram import BINS

#: number of histograms that are searched at once (2 MiB)
GROUP = 8
#: function that returns the replacement of a tensor
Move = Callable[[torch.Tensor], torch.Tensor]
#: occupied bins of a group of concatenated histograms: their positions, int64 [N], and their counts, int64 [N]
Bins = tuple[torch.Tensor, torch.Tensor]


class TensorHolder(Protocol):
    """An object that keeps tensors until their step is measured."""

    def move_tensors(self, to: Move) -> None:
        """Replace each tensor by the result of `to`."""


class DeviceToHostCopy:
    """A copy to the host. The training thread prepares it after a step without waiting, and a background thread makes it."""

    def __init__(self, holders: Sequence[TensorHolder], devices: Collection[torch.device]) -> None:
        """
        Args:
            holders: objects that keep tensors, on any device.
            devices: devices of these tensors.
        """
        self._holders = holders
        self._over = {device: _mark(device) for device in set(devices) if device.type == "cuda"}
        self._on_device = any(device.type != "cpu" for device in devices)
        self._done = False

    def finish_copy(self) -> None:
        """Copy all tensors to host memory after the device has finished the step. A second call does nothing."""
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
            holder.move_tensors(lambda x: home.get(id(x), x))


def _mark(device: torch.device) -> torch.cuda.Event:
    with torch.cuda.device(device):
        over = torch.cuda.Event()
        over.record()
    return over


def _by_device(holders: Sequence[TensorHolder]) -> list[list[torch.Tensor]]:
    """Return the tensors that are not in host memory, as a list for each device, without duplicates."""
    found: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            found[x.device][id(x)] = x
        return x

    for holder in holders:
        holder.move_tensors(note)
    return [list(tensors.values()) for tensors in found.values()]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies. It is always the same, because torch reuses freed memory only within a stream."""
    return torch.cuda.Stream(device)


def _to_host(away: torch.Tensor) -> torch.Tensor:
    if away.device.type != "cuda":
        return away.cpu()
    pinned = torch.empty(away.shape, dtype=away.dtype, pin_memory=True)
    pinned.copy_(away, non_blocking=True)
    torch.cuda.current_stream(away.device).synchronize()
    return pinned


def copied_to_host(tensors: Sequence[torch.Tensor], to_host: Move) -> list[torch.Tensor]:
    """Return tensors of one device in host memory, using one copy. Only occupied bins of histograms are copied."""
    histograms = [x for x in tensors if _is_histogram(x)]
    others = [x for x in tensors if not _is_histogram(x)]
    groups = _thinned(histograms)
    bins = [x for where, there in groups for x in (where.int(), there)]
    away = [*bins, *others]
    home = iter(unpacked(to_host(packed(away)), away))
    counts = _filled([(next(home), next(home)) for _ in groups], len(histograms))
    rest = iter(list(home))
    return [next(counts) if _is_histogram(x) else next(rest) for x in tensors]


def _is_histogram(x: torch.Tensor) -> bool:
    return x.dtype == torch.int64 and x.shape == (BINS,)


def _thinned(histograms: Sequence[torch.Tensor]) -> list[Bins]:
    """Return the occupied bins, group by group. Groups limit device memory, but each group waits for the device once."""
    found = []
    for i in range(0, len(histograms), GROUP):
        counts = torch.cat(list(histograms[i : i + GROUP]))
        where = counts.nonzero().view(-1)
        found.append((where, counts[where]))
    return found


def _filled(groups: Sequence[Bins], n: int) -> Iterator[torch.Tensor]:
    """Yield the `n` histograms from the result of `_thinned`."""
    for i, (where, there) in enumerate(groups):
        counts = np.zeros((min(GROUP, n - GROUP * i), BINS), np.int64)  # most of this memory is never written
        counts.reshape(-1)[where.numpy()] = there.numpy()
        yield from torch.from_numpy(counts)


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' bytes end to end, uint8 [n]. The widest dtypes come first, so that each keeps its alignment."""
    return torch.cat([_bytes(x) for x in sorted(tensors, key=_width)])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1).contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single value may have a stride of 0


def unpacked(bytes_of_all: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like those of `like`, in the same order, as views of the result of `packed`."""
    order = sorted(range(len(like)), key=lambda i: _width(like[i]))
    parts = bytes_of_all.split([like[i].numel() * like[i].element_size() for i in order])
    found = {i: part.view(like[i].dtype).view(like[i].shape) for i, part in zip(order, parts, strict=True)}
    return [found[i] for i in range(len(like))]


def _width(x: torch.Tensor) -> int:
    return -x.element_size()

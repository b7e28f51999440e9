"""What a sampled step left on a device, brought to the host once it is over, off the stream of the training.

Tensors of a device travel as one, and of histograms only the bins that are not empty.
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

#: histograms whose bins are looked for at a time, 2 MiB of them
GROUP = 8
#: gives the tensor that takes the place of one
Move = Callable[[torch.Tensor], torch.Tensor]
#: of a group of histograms, end to end: where they are not empty, int64 [N], and the counts there, int64 [N]
Bins = tuple[torch.Tensor, torch.Tensor]


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


def copied_to_host(tensors: Sequence[torch.Tensor], to_host: Move) -> list[torch.Tensor]:
    """Tensors of one device in host memory, by one copy; of histograms only the bins that are not empty travel."""
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
    """A group a time, each of which waits for the device once, so that it takes little of its memory."""
    found = []
    for i in range(0, len(histograms), GROUP):
        counts = torch.cat(list(histograms[i : i + GROUP]))
        where = counts.nonzero().view(-1)
        found.append((where, counts[where]))
    return found


def _filled(groups: Sequence[Bins], n: int) -> Iterator[torch.Tensor]:
    """The `n` histograms that `_thinned` made those of."""
    for i, (where, there) in enumerate(groups):
        counts = np.zeros((min(GROUP, n - GROUP * i), BINS), np.int64)  # mostly never touched
        counts.reshape(-1)[where.numpy()] = there.numpy()
        yield from torch.from_numpy(counts)


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes end to end, uint8 [n], those of the widest dtypes first so that each keeps its alignment."""
    return torch.cat([_bytes(x) for x in sorted(tensors, key=_width)])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1).contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single value may have a stride of 0


def unpacked(bytes_of_all: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `packed` made of tensors, in their order."""
    order = sorted(range(len(like)), key=lambda i: _width(like[i]))
    parts = bytes_of_all.split([like[i].numel() * like[i].element_size() for i in order])
    found = {i: part.view(like[i].dtype).view(like[i].shape) for i, part in zip(order, parts, strict=True)}
    return [found[i] for i in range(len(like))]


def _width(x: torch.Tensor) -> int:
    return -x.element_size()

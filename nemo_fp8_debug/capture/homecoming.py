"""What a sampled step left on a device, brought to the host in one copy, off the stream of the training."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ..numerics.sketch import BINS

#: sketches whose bins are looked for at a time, 2 MiB of them
GROUP = 8

#: gives the tensor that takes the place of one
Move = Callable[[torch.Tensor], torch.Tensor]


class Holder(Protocol):
    """Holds tensors until a step is measured."""

    def move(self, to: Move) -> None:
        """Replace each of them by what `to` gives for it."""


class Homecoming:
    """Made in the training thread when a step is over, which waits for nothing; the way home is taken in the background."""

    def __init__(self, holders: Sequence[Holder], devices: Collection[torch.device]) -> None:
        """
        Args:
            holders: of tensors, on any device.
            devices: that these are on.
        """
        self._holders = holders
        self._over = {device: _mark(device) for device in set(devices) if device.type == "cuda"}
        self._away = any(device.type != "cpu" for device in devices)

    def wait(self) -> None:
        """Have all tensors in host memory, once the device has come to the end of the step; nothing more if called again."""
        if not self._away:
            return
        home: dict[int, torch.Tensor] = {}
        for device, tensors in _by_device(self._holders).items():
            over = self._over.get(device)
            found = _apart(tensors, device, over) if over else brought(tensors, torch.Tensor.cpu)
            home |= zip(map(id, tensors), found, strict=True)
        for holder in self._holders:
            holder.move(lambda x: home.get(id(x), x))
        self._away = False


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


def _apart(tensors: Sequence[torch.Tensor], device: torch.device, over: torch.cuda.Event) -> list[torch.Tensor]:
    """Brought in a stream of its own, once the one of the training has come to the end of the step."""
    stream = _stream(device)

    def to_host(away: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(away.shape, dtype=away.dtype, pin_memory=True)
        pinned.copy_(away, non_blocking=True)
        stream.synchronize()
        return pinned

    with torch.cuda.stream(stream):
        stream.wait_event(over)
        return brought(tensors, to_host)


def brought(tensors: Sequence[torch.Tensor], to_host: Move) -> list[torch.Tensor]:
    """Tensors of one device in host memory, by one copy; of sketches only the bins that are not empty travel."""
    sketches = [x for x in tensors if _is_sketch(x)]
    others = [x for x in tensors if not _is_sketch(x)]
    away = [*_thinned(sketches), *others]
    home = unpacked(to_host(packed(away)), away)
    filled, rest = _filled(home[: len(away) - len(others)], len(sketches)), iter(home[len(away) - len(others) :])
    return [next(filled) if _is_sketch(x) else next(rest) for x in tensors]


def _is_sketch(x: torch.Tensor) -> bool:
    return x.dtype == torch.int64 and x.shape == (BINS,)


def _thinned(sketches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where those of a group, end to end, are not empty, int32 [T], and what is there, [T]; and so on for each group.

    A group a time, each of which waits for the device once, so that it takes little of its memory.
    """
    found = []
    for i in range(0, len(sketches), GROUP):
        counts = torch.cat(list(sketches[i : i + GROUP]))
        where = counts.nonzero().view(-1)
        found += [where.int(), counts[where]]
    return found


def _filled(thinned: Sequence[torch.Tensor], n: int) -> Iterator[torch.Tensor]:
    """The `n` sketches that `_thinned` made that of."""
    for i in range(0, n, GROUP):
        where, there = thinned[2 * i // GROUP], thinned[2 * i // GROUP + 1]
        counts = np.zeros((min(GROUP, n - i), BINS), np.int64)  # mostly never touched
        counts.reshape(-1)[where.numpy()] = there.numpy()
        yield from torch.from_numpy(counts).unbind()


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

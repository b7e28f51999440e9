"""Tensors of a device as one that is copied to the host: of histograms only what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..numerics.histogram import BINS

#: histograms whose bins are looked for at a time, 2 MiB of them
GROUP = 8

#: gives the tensor that takes the place of one
Move = Callable[[torch.Tensor], torch.Tensor]
#: of a group of histograms, end to end: where they are not empty, int64 [N], and the counts there, int64 [N]
Bins = tuple[torch.Tensor, torch.Tensor]


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

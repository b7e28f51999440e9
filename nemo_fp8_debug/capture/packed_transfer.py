"""Tensors of a device as one that is copied to the host: of histograms what they hold, and what metrics will ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..numerics.histogram import BINS, Histogram, HistogramBatch, Occupied
from ..numerics.precomputed import CastRequest, CastRequests, PrecomputedSums

#: histograms whose bins are looked for at a time, 2 MiB of them
GROUP = 8
#: occupied bins that are measured at a time, which takes some 10 MiB
AT_ONCE = 1 << 17

#: gives the tensor that takes the place of one
Move = Callable[[torch.Tensor], torch.Tensor]
#: of a group of histograms, end to end: where they are not empty, int64 [N], and the counts there, int64 [N]
Bins = tuple[torch.Tensor, torch.Tensor]


def copied_to_host(tensors: Sequence[torch.Tensor], to_host: Move, requests: CastRequests = ()) -> list[torch.Tensor]:
    """Tensors of one device in host memory, by one copy; of histograms only the bins that are not empty travel.

    Args:
        requests: histograms, some of whose counts are among the tensors: what is asked of these is found where they are, and
            comes along.
    """
    histograms = [x for x in tensors if _is_histogram(x)]
    others = [x for x in tensors if not _is_histogram(x)]
    rows = {id(counts): row for row, counts in enumerate(histograms)}
    about = {row: of for of in requests if (row := rows.get(id(of[0].counts))) is not None}
    groups = _thinned(histograms)
    precomputed = _precomputed_of(groups, [about.get(row) for row in range(len(histograms))]) if about else None
    bins = [x for where, there in groups for x in (where.int(), there)]
    away = [*bins, *others, *(precomputed.tensors() if precomputed else ())]
    home = iter(unpacked(to_host(packed(away)), away))
    filled = list(_filled([(next(home), next(home)) for _ in groups], len(histograms)))
    rest = iter([next(home) for _ in others])
    if precomputed:
        found = precomputed.moved(lambda _: next(home))
        for row, (histogram, _) in about.items():
            histogram.precomputed, histogram.occupied = (found, row), filled[row][1]
    counts = iter([table for table, _ in filled])
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


def _precomputed_of(
    groups: Sequence[Bins], about: Sequence[tuple[Histogram, Sequence[CastRequest]] | None]
) -> PrecomputedSums:
    """What is asked of all histograms of those groups."""
    dtypes = [of[0].dtype if of else torch.bfloat16 for of in about]

    def batches() -> Iterator[HistogramBatch]:
        start = 0
        for portion in _portions(groups):
            where = torch.cat([where + BINS * GROUP * i for i, (where, _) in enumerate(portion)])
            mine = dtypes[start : start + GROUP * len(portion)]
            yield HistogramBatch.of_bins(where, torch.cat([there for _, there in portion]), mine)
            start += len(mine)

    return PrecomputedSums.of(batches(), [of[1] if of else () for of in about])


def _portions(groups: Sequence[Bins]) -> Iterator[list[Bins]]:
    """Groups that are measured together."""
    portion: list[Bins] = []
    for group in groups:
        if portion and sum(len(where) for where, _ in [*portion, group]) > AT_ONCE:
            yield portion
            portion = []
        portion.append(group)
    yield portion


def _filled(groups: Sequence[Bins], n: int) -> Iterator[tuple[torch.Tensor, Occupied]]:
    """The `n` histograms that `_thinned` made those of, and what is occupied of each."""
    for i, (away, counted) in enumerate(groups):
        where, there, of_group = away.numpy().astype(np.int64), counted.numpy(), min(GROUP, n - GROUP * i)
        counts = np.zeros((of_group, BINS), np.int64)  # mostly never touched
        counts.reshape(-1)[where] = there
        ends = np.searchsorted(where, BINS * np.arange(of_group + 1))
        for k, (table, first, end) in enumerate(zip(counts, ends, ends[1:], strict=False)):
            yield torch.from_numpy(table), (where[first:end] - BINS * k, there[first:end])


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

"""What metrics ask of histograms, found precomputed: on the device that they are on, or on the host by a loop of its own.

Metrics ask by scale and format: what they ask otherwise is computed then, and is the same to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from . import metrics
from .formats import E4M3, FloatFormat
from .histogram import Histogram, HistogramBatch
from .metrics import Moments, QuantizationSums
from .tensor_scaling import CurrentScaling, scales_of

#: a scale, float32 scalar on any device, or the rule that finds it from the amax; and the format
CastRequest = tuple[torch.Tensor | CurrentScaling, FloatFormat]
#: histograms, and under what metrics will ask for the sums of each
CastRequests = Sequence[tuple[Histogram, Sequence[CastRequest]]]
#: scales and formats of S histograms; None where a histogram is not asked for one
Column = tuple[list[torch.Tensor | CurrentScaling | None], list[FloatFormat]]


def in_columns(requests: Sequence[Sequence[CastRequest]]) -> list[Column]:
    """What each of S histograms is asked first, what second, and so on."""
    width = max(map(len, requests), default=0)
    padded = [[*of, *[(None, E4M3)] * (width - len(of))] for of in requests]
    return [([of[a][0] for of in padded], [of[a][1] for of in padded]) for a in range(width)]


@dataclass(frozen=True)
class PrecomputedSums:
    """Of S histograms, each under up to A scales."""

    #: S rows
    moments: Moments
    #: float32 [A, S]; NaN where a histogram was not asked for that many
    scales: torch.Tensor
    #: [A, S]
    formats: list[list[FloatFormat]]
    #: A tables of S rows
    sums: list[QuantizationSums]

    @classmethod
    def of(cls, batches: Iterable[HistogramBatch], requests: Sequence[Sequence[CastRequest]]) -> PrecomputedSums:
        """Of all histograms of some batches, on their device, a batch at a time.

        Args:
            requests: of each histogram.
        """
        columns = in_columns(requests)
        moments, scales, sums, start = [], [], [], 0
        for batch in batches:
            mine = slice(start, start := start + len(batch.lengths))
            moments.append(metrics.moments(batch))
            amax = moments[-1].amax.float()
            found = [scales_of(held[mine], formats[mine], amax) for held, formats in columns]
            scales.append(torch.stack(found) if found else amax.new_zeros(0, len(amax)))
            of_batch = zip(found, columns, strict=True)
            sums.append([metrics.quantization_sums(batch, scale, formats[mine]) for scale, (_, formats) in of_batch])
        summed = [QuantizationSums.concat([of[a] for of in sums]) for a in range(len(columns))]
        return cls(Moments.concat(moments), torch.cat(scales, 1), [formats for _, formats in columns], summed)

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in an order of their own."""
        found: list[torch.Tensor] = []

        def note(x: torch.Tensor) -> torch.Tensor:
            found.append(x)
            return x

        self.moved(note)
        return found

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> PrecomputedSums:
        """The same with what `to` gives for each tensor, in that order."""
        return PrecomputedSums(self.moments.moved(to), to(self.scales), self.formats, [s.moved(to) for s in self.sums])

    def sums_for(self, rows: Sequence[int], scale: torch.Tensor, formats: Sequence[FloatFormat]) -> QuantizationSums | None:
        """Sums of some histograms, each under its scale, float32 [C], and its format; None if one of them was not found."""
        if not self.formats:
            return None
        at = torch.tensor(rows, dtype=torch.int64)
        same = [torch.tensor([of[row] is fmt for row, fmt in zip(rows, formats, strict=True)]) for of in self.formats]
        hits = torch.stack([(known[at] == scale) & fits for known, fits in zip(self.scales, same, strict=True)])
        if not hits.any(0).all():
            return None
        column = hits.int().argmax(0)
        return QuantizationSums.concat(self.sums).rows(column * len(self.moments.n) + at)


class Histograms:
    """B histograms whose metrics are wanted: what was found precomputed, or else is computed here."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = histograms
        known = [histogram.precomputed for histogram in histograms]
        self._precomputed: PrecomputedSums | None = known[0][0] if known and known[0] else None
        self._rows = [row for precomputed, row in filter(None, known) if precomputed is self._precomputed]
        if len(self._rows) < len(histograms):
            self._precomputed = None

    def select(self, rows: Sequence[int]) -> Histograms:
        """Some of them, in order."""
        return self if len(rows) == len(self._histograms) else Histograms([self._histograms[i] for i in rows])

    @functools.cached_property
    def _batch(self) -> HistogramBatch:
        return HistogramBatch.of(self._histograms)

    @functools.cached_property
    def moments(self) -> Moments:
        """B rows."""
        if self._precomputed:
            return self._precomputed.moments.rows(torch.tensor(self._rows, dtype=torch.int64))
        return metrics.moments(self._batch)

    def amax(self) -> torch.Tensor:
        """float32 [B], see `HistogramBatch.amax`."""
        return self.moments.amax.float() if self._precomputed else self._batch.amax()

    def quantization_sums(self, scale: torch.Tensor, formats: Sequence[FloatFormat]) -> QuantizationSums:
        """B rows, each under its own scale, float32 [B], and format."""
        found = self._precomputed.sums_for(self._rows, scale, formats) if self._precomputed else None
        return found or metrics.quantization_sums(self._batch, scale, formats)

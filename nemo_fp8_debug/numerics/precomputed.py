"""What figures ask of sketches, found ahead: on the device that they are on, or on the host by a loop of its own.

Figures ask by scale and format: what they ask otherwise is computed then, and is the same to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from . import metrics
from .formats import E4M3, FloatFormat
from .histogram import Sketch, SketchBatch
from .metrics import Moments, QuantizationSums
from .tensor_scaling import CurrentScaling, scales_of

#: a scale, float32 scalar on any device, or the rule that finds it from the amax; and the format
Ask = tuple[torch.Tensor | CurrentScaling, FloatFormat]
#: sketches, and under what figures will ask for the sums of each
Asked = Sequence[tuple[Sketch, Sequence[Ask]]]
#: scales and formats of S sketches; None where a sketch is not asked for one
Column = tuple[list[torch.Tensor | CurrentScaling | None], list[FloatFormat]]


def in_columns(asks: Sequence[Sequence[Ask]]) -> list[Column]:
    """What each of S sketches is asked first, what second, and so on."""
    width = max(map(len, asks), default=0)
    padded = [[*of, *[(None, E4M3)] * (width - len(of))] for of in asks]
    return [([of[a][0] for of in padded], [of[a][1] for of in padded]) for a in range(width)]


@dataclass(frozen=True)
class Ahead:
    """Of S sketches, each under up to A scales."""

    #: S rows
    moments: Moments
    #: float32 [A, S]; NaN where a sketch was not asked for that many
    scales: torch.Tensor
    #: [A, S]
    formats: list[list[FloatFormat]]
    #: A tables of S rows
    sums: list[QuantizationSums]

    @classmethod
    def of(cls, batches: Iterable[SketchBatch], asks: Sequence[Sequence[Ask]]) -> Ahead:
        """Of all sketches of some batches, on their device, a batch at a time.

        Args:
            asks: of each sketch.
        """
        columns = in_columns(asks)
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

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Ahead:
        """The same with what `to` gives for each tensor, in that order."""
        return Ahead(self.moments.moved(to), to(self.scales), self.formats, [s.moved(to) for s in self.sums])

    def under(self, rows: Sequence[int], scale: torch.Tensor, formats: Sequence[FloatFormat]) -> QuantizationSums | None:
        """Sums of some sketches, each under its scale, float32 [C], and its format; None if one of them was not found."""
        if not self.formats:
            return None
        at = torch.tensor(rows, dtype=torch.int64)
        same = [torch.tensor([of[row] is fmt for row, fmt in zip(rows, formats, strict=True)]) for of in self.formats]
        hits = torch.stack([(known[at] == scale) & fits for known, fits in zip(self.scales, same, strict=True)])
        if not hits.any(0).all():
            return None
        column = hits.int().argmax(0)
        return QuantizationSums.concat(self.sums).rows(column * len(self.moments.n) + at)


class Sketches:
    """B sketches whose figures are wanted: what was found ahead, or else is computed here."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self._sketches = sketches
        known = [sketch.ahead for sketch in sketches]
        self._ahead: Ahead | None = known[0][0] if known and known[0] else None
        self._rows = [row for ahead, row in filter(None, known) if ahead is self._ahead]
        if len(self._rows) < len(sketches):
            self._ahead = None

    def only(self, rows: Sequence[int]) -> Sketches:
        """Some of them, in order."""
        return self if len(rows) == len(self._sketches) else Sketches([self._sketches[i] for i in rows])

    @functools.cached_property
    def _batch(self) -> SketchBatch:
        return SketchBatch.of(self._sketches)

    @functools.cached_property
    def moments(self) -> Moments:
        """B rows."""
        if self._ahead:
            return self._ahead.moments.rows(torch.tensor(self._rows, dtype=torch.int64))
        return metrics.moments(self._batch)

    def amax(self) -> torch.Tensor:
        """float32 [B], see `SketchBatch.amax`."""
        return self.moments.amax.float() if self._ahead else self._batch.amax()

    def quantization_sums(self, scale: torch.Tensor, formats: Sequence[FloatFormat]) -> QuantizationSums:
        """B rows, each under its own scale, float32 [B], and format."""
        found = self._ahead.under(self._rows, scale, formats) if self._ahead else None
        return found or metrics.quantization_sums(self._batch, scale, formats)

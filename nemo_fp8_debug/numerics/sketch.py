"""The sketch: how often each of the 32,768 magnitudes of a 16-bit format occurs in a tensor.

With the sign folded away it holds all that per-tensor scaling can depend on, whatever the scale, margin or target format.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

BINS = 32768
#: the 16-bit formats that a sketch can hold, in the order of the magnitude table
DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class Sketch:
    """Counts of a tensor's magnitudes; sketches of the same dtype add up over micro-batches, ranks and steps."""

    #: torch.bfloat16 or torch.float16: what the bit patterns mean
    dtype: torch.dtype
    #: int64 [32768]; bin p counts the values whose bits are p or p + 0x8000
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    #: True where float32 values were rounded to bfloat16 to be counted
    rounded: bool = False

    def __add__(self, other: Sketch) -> Sketch:
        if self.dtype != other.dtype:
            raise ValueError(f"cannot add a sketch of {other.dtype} to one of {self.dtype}")
        return Sketch(self.dtype, self.counts + other.counts, self.rounded or other.rounded)


@functools.lru_cache(maxsize=1)
def magnitudes() -> torch.Tensor:
    """Float32 [2 * 32768]: the magnitude that each pattern stands for, bfloat16's then float16's; NaN and inf included."""
    patterns = torch.arange(BINS, dtype=torch.int32).to(torch.int16)
    return torch.cat([patterns.view(dtype).float() for dtype in DTYPES])


@dataclass(frozen=True)
class SketchBatch:
    """The occupied bins of B sketches, laid end to end."""

    #: int64 [B]: how many bins each sketch occupies
    lengths: torch.Tensor
    #: int64 [T]: index into `magnitudes()`
    index: torch.Tensor
    #: int64 [T]
    counts: torch.Tensor

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> SketchBatch:
        """Pack sketches, in their order."""
        parts = [s.counts.nonzero().squeeze(1).cpu() for s in sketches]
        empty = torch.zeros(0, dtype=torch.int64)
        return cls(
            torch.tensor([len(p) for p in parts], dtype=torch.int64),
            torch.cat([empty, *(p + BINS * DTYPES.index(s.dtype) for p, s in zip(parts, sketches, strict=True))]),
            torch.cat([empty, *(s.counts.cpu()[p] for p, s in zip(parts, sketches, strict=True))]),
        )

    @functools.cached_property
    def owner(self) -> torch.Tensor:
        """int64 [T]: which sketch each bin belongs to."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float32 [T]: the magnitude of each bin."""
        return magnitudes()[self.index]

    def per_sketch(self, per_bin: torch.Tensor) -> torch.Tensor:
        """[T] -> [B]: sum over the bins of each sketch, in the dtype given."""
        return torch.zeros(len(self.lengths), dtype=per_bin.dtype).index_add_(0, self.owner, per_bin)

"""The sketch: how often each of the 32,768 magnitudes of a 16-bit format occurs in a tensor.

With the sign folded away it holds all that per-tensor scaling can depend on, whatever the scale, margin or target format.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
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

    @functools.cached_property
    def occupied(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bins that are not empty, ascending, and their counts. Found once: nothing may be counted in afterwards."""
        counts = self.counts.cpu().numpy()
        bins = np.flatnonzero(counts != 0)  # asked first, which takes a quarter of the time
        return bins, counts[bins]

    @property
    def amax(self) -> float:
        """The largest finite magnitude; 0 where there is none."""
        bins, _ = self.occupied
        finite = bins[: np.searchsorted(bins, infinity_bin(self.dtype))]
        return float(magnitudes_of(self.dtype, torch.device("cpu"))[finite[-1]]) if len(finite) else 0.0

    def __add__(self, other: Sketch) -> Sketch:
        if self.dtype != other.dtype:
            raise ValueError(f"cannot add a sketch of {other.dtype} to one of {self.dtype}")
        return Sketch(self.dtype, self.counts + other.counts, self.rounded or other.rounded)

    @classmethod
    def total(cls, sketches: Sequence[Sketch]) -> Sketch:
        """All of one dtype added up, without a new table for each."""
        first, *rest = sketches
        added = Sketch(first.dtype, first.counts.clone(), first.rounded)
        for sketch in rest:
            if sketch.dtype != added.dtype:
                raise ValueError(f"cannot add a sketch of {sketch.dtype} to one of {added.dtype}")
            added.counts += sketch.counts
            added.rounded = added.rounded or sketch.rounded
        return added


@functools.lru_cache(maxsize=len(DTYPES))
def infinity_bin(dtype: torch.dtype) -> int:
    """The bin of infinity; finite magnitudes lie below it, NaNs above."""
    return int(torch.tensor(torch.inf, dtype=dtype).view(torch.int16))


@functools.lru_cache(maxsize=1)
def magnitudes() -> torch.Tensor:
    """Float32 [2 * 32768]: the magnitude that each pattern stands for, bfloat16's then float16's; NaN and inf included."""
    patterns = torch.arange(BINS, dtype=torch.int32).to(torch.int16)
    return torch.cat([patterns.view(dtype).float() for dtype in DTYPES])


@functools.lru_cache(maxsize=16)
def magnitudes_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Float32 [32768]: the magnitude of each bin; NaN and inf included."""
    start = BINS * DTYPES.index(dtype)
    return magnitudes()[start : start + BINS].to(device)


@dataclass(frozen=True)
class SketchBatch:
    """The occupied bins of B sketches, laid end to end: finite magnitudes in ascending order, the others counted apart."""

    #: int64 [B]: how many bins each sketch occupies
    lengths: torch.Tensor
    #: int64 [T]: index into `magnitudes()`
    index: torch.Tensor
    #: int64 [T]
    counts: torch.Tensor
    #: int64 [B]
    inf: torch.Tensor
    #: int64 [B]
    nan: torch.Tensor

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> SketchBatch:
        """Pack sketches, in their order."""
        index, counts, inf, nan = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [], []
        for sketch in sketches:
            bins, of_bins = sketch.occupied
            end = infinity_bin(sketch.dtype)
            finite, after = np.searchsorted(bins, (end, end + 1))
            index.append(bins[:finite] + BINS * DTYPES.index(sketch.dtype))
            counts.append(of_bins[:finite])
            inf.append(int(of_bins[finite:after].sum()))
            nan.append(int(of_bins[after:].sum()))
        lengths = torch.tensor([len(c) for c in counts[1:]], dtype=torch.int64)
        return cls(
            lengths,
            torch.from_numpy(np.concatenate(index)),
            torch.from_numpy(np.concatenate(counts)),
            torch.tensor(inf, dtype=torch.int64),
            torch.tensor(nan, dtype=torch.int64),
        )

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float32 [T]: the magnitude of each bin."""
        return magnitudes()[self.index]

    @functools.cached_property
    def weights(self) -> torch.Tensor:
        """float64 [T]: the counts, of which it holds all below 2^53."""
        return self.counts.double()

    def amax(self) -> torch.Tensor:
        """float32 [B]: the largest finite magnitude of each sketch, its last bin; 0 where there is none."""
        padded = torch.cat([self.values.new_zeros(1), self.values])
        return torch.where(self.lengths > 0, padded[self.lengths.cumsum(0)], 0.0)

    def per_sketch(self, per_bin: torch.Tensor) -> torch.Tensor:
        """[T] -> [B]: float64 sum over the bins of each sketch."""
        return torch.segment_reduce(per_bin, "sum", lengths=self.lengths, unsafe=True)

"""The histogram: how often each of the 32,768 magnitudes of a 16-bit format occurs in a tensor.

Except for signs, it contains everything that per-tensor scaling depends on, for any scale, margin or target format.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

BINS = 32768
#: the 16-bit dtypes that we make histograms of, in the order of the magnitude table
DTYPES = (torch.bfloat16, torch.float16)
#: how many bins are added up at once
LANES = 64
_HOST = torch.device("cpu")
#: occupied bins in ascending order, and their counts, int64
Occupied = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass
class Histogram:
    """Counts of a tensor's magnitudes. Histograms of the same dtype can be added up over micro-batches, ranks and steps."""

    #: dtype of the bit patterns, torch.bfloat16 or torch.float16
    dtype: torch.dtype
    #: int64 [32768]; bin p counts the values whose bits are p or p + 0x8000
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    #: whether float32 values were rounded to bfloat16 for counting
    rounded: bool = False

    @functools.cached_property
    def occupied_bins(self) -> Occupied:
        """The occupied bins in ascending order, and their counts, computed once. Do not count values afterwards."""
        counts = self.counts.cpu().numpy()
        bins = np.flatnonzero(counts != 0)  # the comparison first takes a quarter of the time
        return bins, counts[bins]

    @property
    def infinity_bin(self) -> int:
        """The bin of infinity. Bins below it have finite magnitudes, bins above it NaN."""
        return find_infinity_bin(self.dtype)

    @property
    def amax(self) -> float:
        """The largest finite magnitude, or 0 if the histogram has no finite values."""
        bins, _ = self.occupied_bins
        finite = bins[: bins.searchsorted(self.infinity_bin)]
        return float(_of_host(self.dtype)[finite[-1]]) if len(finite) else 0.0

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram.sum_histograms((self, other))

    @classmethod
    def sum_histograms(cls, histograms: Sequence[Histogram]) -> Histogram:
        """Return a new histogram, the sum of histograms of one dtype."""
        first, *rest = histograms
        added = Histogram(first.dtype, first.counts.clone(), first.rounded)
        for histogram in rest:
            if histogram.dtype != added.dtype:
                raise ValueError(f"cannot add a histogram of {histogram.dtype} to one of {added.dtype}")
            added.counts += histogram.counts
            added.rounded = added.rounded or histogram.rounded
        return added


@functools.lru_cache(maxsize=len(DTYPES))
def find_infinity_bin(dtype: torch.dtype) -> int:
    """Return the bin of infinity. Bins below it have finite magnitudes, bins above it NaN."""
    return int(torch.tensor(torch.inf, dtype=dtype).view(torch.int16))


@functools.lru_cache(maxsize=8)
def list_pattern_magnitudes(device: torch.device = _HOST) -> torch.Tensor:
    """Return the magnitude of each pattern, with NaN and infinity: float32 [2 * 32768], bfloat16 before float16."""
    patterns = torch.arange(BINS, dtype=torch.int32).to(torch.int16)
    return torch.cat([patterns.view(dtype).float() for dtype in DTYPES]).to(device)


@functools.cache
def _of_host(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = compute_bin_magnitudes(dtype, _HOST).numpy()
    return found


def compute_bin_magnitudes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the magnitude of each bin, with NaN and infinity, float32 [32768]."""
    start = BINS * DTYPES.index(dtype)
    return list_pattern_magnitudes(device)[start : start + BINS]


@dataclass(frozen=True)
class HistogramBatch:
    """The occupied bins of B histograms, end to end: finite magnitudes in ascending order.

    NaN and infinity are counted separately.

    Each histogram is padded with empty bins to a multiple of LANES. So we add up in the same order on any device and in any
    batch.
    """

    #: how many bins each histogram occupies, [B]
    lengths: list[int]
    #: for each bin, its index in the result of `list_pattern_magnitudes`, int64 [T]
    index: torch.Tensor
    #: int64 [T]
    counts: torch.Tensor
    #: int64 [B]
    inf: torch.Tensor
    #: int64 [B]
    nan: torch.Tensor

    @classmethod
    def pack_histograms(cls, histograms: Sequence[Histogram]) -> HistogramBatch:
        """Pack histograms in host memory, in their order."""
        ends = [histogram.infinity_bin for histogram in histograms]
        borders = [np.searchsorted(s.occupied_bins[0], (end, end + 1)) for s, end in zip(histograms, ends, strict=True)]
        lengths = [int(finite) for finite, _ in borders]
        index, counts = (np.zeros(LANES * sum(map(count_lane_groups, lengths)), np.int64) for _ in range(2))
        inf, nan, start = [], [], 0
        for histogram, (finite, after) in zip(histograms, borders, strict=True):
            bins, of_bins = histogram.occupied_bins
            index[start : start + finite] = bins[:finite] + BINS * DTYPES.index(histogram.dtype)
            counts[start : start + finite] = of_bins[:finite]
            inf.append(int(of_bins[finite:after].sum()))
            nan.append(int(of_bins[after:].sum()))
            start += LANES * count_lane_groups(finite)
        others = (torch.tensor(of_others, dtype=torch.int64) for of_others in (inf, nan))
        return cls(lengths, torch.from_numpy(index), torch.from_numpy(counts), *others)

    @functools.cached_property
    def room(self) -> torch.Tensor:
        """Return the number of bins of each histogram, with padding, int64 [B]."""
        return torch.tensor([LANES * count_lane_groups(length) for length in self.lengths], dtype=torch.int64).to(
            self.index.device
        )

    @functools.cached_property
    def bin_starts(self) -> torch.Tensor:
        """Return the index of the first bin of each histogram, int64 [B]."""
        return self.room.cumsum(0) - self.room

    @functools.cached_property
    def bin_ends(self) -> torch.Tensor:
        """Return the index after the last bin of each histogram, int64 [B]."""
        return self.bin_starts + torch.tensor(self.lengths, dtype=torch.int64).to(self.index.device)

    @functools.cached_property
    def bin_magnitudes(self) -> torch.Tensor:
        """Return the magnitude of each bin, float32 [T]."""
        return list_pattern_magnitudes(self.index.device)[self.index]

    @functools.cached_property
    def bin_counts(self) -> torch.Tensor:
        """Return the counts, float64 [T], exact below 2^53."""
        return self.counts.double()

    def amax(self) -> torch.Tensor:
        """Return the largest finite magnitude of each histogram, float32 [B], or 0 if it has no finite values."""
        padded = torch.cat([self.bin_magnitudes.new_zeros(1), self.bin_magnitudes])
        return torch.where(self.bin_ends > self.bin_starts, padded[self.bin_ends], 0.0)

    def expand_to_bins(self, per_histogram: torch.Tensor) -> torch.Tensor:
        """Repeat each histogram's value for each of its bins. The input is [B], the result [T]."""
        return per_histogram.repeat_interleave(self.room, output_size=len(self.index))

    def sum_bins(self, per_bin: torch.Tensor) -> torch.Tensor:
        """Sum over the bins of each histogram, in float64. The input is [T], the result [B]."""
        lanes = per_bin.view(-1, LANES)
        while (half := lanes.shape[1] // 2) > 0:
            lanes = lanes[:, :half] + lanes[:, half:]
        width, place = self._pairs
        pairs = per_bin.new_zeros(len(self.lengths) * width)
        pairs[place] = lanes.view(-1)
        while width > 1:
            pairs, width = pairs[0::2] + pairs[1::2], width // 2
        return pairs

    @functools.cached_property
    def _pairs(self) -> tuple[int, torch.Tensor]:
        """Return the width of a table with a row of lanes for each histogram, and each lane's place.

        The width is a power of two.
        """
        lanes = [count_lane_groups(length) for length in self.lengths]
        width = 1 << (max(lanes, default=1) - 1).bit_length() if max(lanes, default=1) > 1 else 1
        place = np.concatenate([np.zeros(0, np.int64), *(width * i + np.arange(n) for i, n in enumerate(lanes))])
        return width, torch.from_numpy(place).to(self.index.device)


def count_lane_groups(bins: int) -> int:
    """Return the number of groups of `LANES` bins that this many bins need."""
    return -(-bins // LANES)

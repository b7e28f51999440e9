"""Our CUDA kernels in Numba's simulator, which runs a kernel's source in threads of the host; made fit for many of them.

Imported under `NUMBA_ENABLE_CUDASIM=1`, which Numba looks at when it is imported itself. A grid is how many blocks there
are, and how many threads each has.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np.numpy_support import as_dtype

from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.kernels.cuda import blocks, float32, histogram, sums
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule, compute_block_scales
from nemo_fp8_debug.numerics.formats import FloatFormat
from nemo_fp8_debug.numerics.metrics import QuantizationSums, ValueMoments

Grid = tuple[int, int]


def _array(self: Any, shape: int, dtype: Any) -> Any:
    frame = sys._getframe(1)
    return self._allocations.setdefault((frame.f_code.co_filename, frame.f_lineno), np.empty(shape, as_dtype(dtype)))


# Its own looks whether this line has its array and then makes one: of threads that look at the same time each got its own.
FakeCUDAShared.array = _array
sys.setswitchinterval(1e-4)  # it waits for its threads in a busy loop
# NumPy warns of overflow, which the kernels mean to happen, and notes it among the module's names while the simulator's
# other threads go through these: the place for it has to be there before.
warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
for module in (blocks, float32, histogram, sums):
    vars(module).setdefault("__warningregistry__", {})


def bits(x: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The patterns of 16-bit values, in one row."""
    return x.view(torch.int16).numpy().view(np.uint16).reshape(-1)


def count(values: npt.NDArray[np.uint16], infinity: int, counts: npt.NDArray[np.int64], grid: Grid) -> None:
    """Add to `counts` how often each magnitude pattern occurs."""
    head, body = histogram.words_of(values.ctypes.data, len(values))
    words = values[head : head + 4 * body].view(np.uint64)
    histogram.launch_histogram_kernel(values, words, (head, body), infinity, counts, grid)


def block_sums(x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, grid: Grid) -> QuantizationSums:
    """The sums of a matrix of 16-bit values under the scales of its blocks."""
    patterns, out = bits(x), np.full(grid[0] * sums.SUMS, np.nan)
    words = patterns.view(np.uint64) if blocks.whole_words(x.data_ptr(), x.shape[1]) else np.zeros(0, np.uint64)
    whole = blocks.amax_of_histogram(count_histogram(x)) if rule.two_level else torch.zeros(())
    _, scale, scale_inv = compute_block_scales(rule, whole, fmt, x.dtype)
    known = blocks.make_kernel_arguments(x.shape, rule.get_block_shape(role), x.dtype, fmt)
    blocks.launch_block_kernel(patterns, words, known, (scale.numpy(), scale_inv.numpy()), out, grid)
    return sums.sum_part_rows(torch.from_numpy(out).view(grid[0], -1))


def float32_moments(x: torch.Tensor, grid: Grid) -> ValueMoments:
    """The moments of a float32 tensor."""
    out = np.full(grid[0] * (float32.MOMENTS + 2), np.nan)
    float32.launch_moments(_bits32(x), out, grid)
    return float32.moments_of_parts(torch.from_numpy(out), x.numel())


def float32_sums(x: torch.Tensor, scale: float, fmt: FloatFormat, grid: Grid) -> QuantizationSums:
    """The sums of a float32 tensor under one scale."""
    out = np.full(grid[0] * sums.SUMS, np.nan)
    float32.launch_sums(_bits32(x), np.array([scale], np.float32), fmt, out, grid)
    return sums.sum_part_rows(torch.from_numpy(out).view(grid[0], -1))


def _bits32(x: torch.Tensor) -> npt.NDArray[np.uint32]:
    return x.view(torch.int32).numpy().view(np.uint32).reshape(-1)

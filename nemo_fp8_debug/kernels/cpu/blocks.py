"""The sums of a 16-bit operand's error under block scales, in CPU memory.

The amax of a block is a magnitude of its dtype, one of 32,768, so its scale is looked up. That leaves loops without a call.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...numerics.block_scaling import WHOLE_ROW, Block, BlockRule, matrix
from ...numerics.formats import FloatFormat
from ...numerics.histogram import BINS, Histogram, infinity_bin, magnitudes_of
from ...numerics.metrics import QuantizationSums
from ..memory import address_of
from .binary_blocks import add_shortened, sums_of_small
from .block_loops import sums_of_blocks, sums_of_rows
from .block_scales import Tables, bounds, tables_of, tables_of_one_level
from .casts import digits
from .jit import JOB, Work
from .panels import MANY, RESULTS, TOLD, Layout, PanelJob, add_up
from .simd import PANEL
from .threads import ZeroedArrays, share_out

#: values one thread gets at the least
GRAIN = 1 << 18
_small = ZeroedArrays((BINS,), np.int64)


class _Operand(NamedTuple):
    """An operand as panels of blocks."""

    #: the tensor in whose memory its values are
    kept: torch.Tensor
    layout: Layout
    block: Block

    @property
    def in_rows(self) -> bool:
        """Whether each row is a block."""
        return self.block[1] == WHOLE_ROW

    @property
    def panels(self) -> int:
        if self.in_rows:
            return self.layout[0]
        return math.ceil(self.layout[0] / self.block[0]) * math.ceil(self.layout[1] / PANEL)

    @property
    def shares(self) -> int:
        return max(1, min(torch.get_num_threads(), self.panels, self.kept.numel() // GRAIN))

    @property
    def half(self) -> bool:
        return self.kept.dtype == torch.float16

    @property
    def infinity(self) -> int:
        return infinity_bin(self.kept.dtype)


def _operand(x: torch.Tensor, block: Block) -> _Operand:
    columns = x.shape[-1] if x.dim() else 1
    rows, stride, kept = x.numel() // columns, columns, x
    if not x.is_contiguous():
        kept = matrix(x)
        if kept.stride(1) != 1:
            kept = kept.contiguous()
        stride = kept.stride(0) if rows > 1 else columns
    whole = block[0] == 1 and stride == columns and columns % block[1] == 0
    return _Operand(kept, (1, rows * columns, rows * columns) if whole else (rows, columns, stride), block)


def block_sums(x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat, counted: Histogram) -> QuantizationSums:
    """As `numerics.block_scaling.quantization_sums_in_blocks`, in another order of adding up.

    Args:
        x: bfloat16 or float16, not empty, in CPU memory.
        counted: the histogram of `x`.
    """
    operand, counts = _operand(x, rule.block(role)), counted.counts.data_ptr()
    if rule.two_level:
        tables = tables_of(rule, fmt, x.dtype, *bounds(counts, operand.infinity))
    else:
        tables = tables_of_one_level(rule, fmt, x.dtype)
    found = (tables.binary and not operand.in_rows and _of_few(operand, tables, fmt, counts)) or _of_all(operand, tables)
    integers = np.frombuffer(found, np.int64)[JOB:]
    floats = integers.view(np.float64)
    # Torch's own ways to cut a tensor up, or to make one of a number, take several times as long.
    ones = integers[0:1], integers[1:2], floats[4:5], floats[5:6], floats[6:7]
    return QuantizationSums(*map(torch.from_numpy, ones))


def _of_all(operand: _Operand, tables: Tables) -> Any:
    """Of each value by itself."""
    if operand.in_rows:
        return _shared_out(sums_of_rows(operand.half), operand, tables, operand.shares)
    return _shared_out(sums_of_blocks(operand.block[1], operand.half), operand, tables, operand.shares)


def _of_few(operand: _Operand, tables: Tables, fmt: FloatFormat, counts: int) -> Any:
    """Of what the histogram has counted, but for values that become subnormal, which are looked for; None if they are
    many."""
    shares = operand.shares
    small = _small.take(shares)
    job = _shared_out(sums_of_small(operand.block[1], operand.half), operand, tables, shares, small.ctypes.data)
    if job[JOB + 2] == MANY:
        return None
    anchor, magnitude = 1.5 * 2.0 ** (52 - digits(fmt)), _magnitudes(operand.kept.dtype)
    add_shortened(ctypes.addressof(job), small, counts, operand.kept.numel(), operand.infinity, magnitude, anchor)
    _small.give_back(small)
    return job


def _shared_out(work: Work, operand: _Operand, tables: Tables, shares: int, small: int = 0) -> Any:
    """The job, with what came out of all shares in the first one's place."""
    about = address_of(operand.kept), *operand.layout, operand.block[0], operand.panels, operand.infinity
    job = share_out(work, PanelJob(*about, tables.address, int(tables.clamps), small), shares, RESULTS)
    if shares > 1:
        add_up(ctypes.addressof(job), shares)
    if job[JOB + 3] != TOLD and job[JOB + 2] != MANY:
        raise MemoryError(f"no room to measure an operand of {operand.kept.numel()} values in blocks")
    return job


@functools.cache
def _magnitudes(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    return magnitudes_of(dtype, torch.device("cpu")).numpy()

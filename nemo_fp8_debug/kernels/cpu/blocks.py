"""The sums of a 16-bit operand's error under block scales, in CPU memory.

The amax of a block is a magnitude of its dtype, one of 32,768, so its scale is looked up. That leaves loops without a call.

Under a scale that is a power of two a cast is nothing but a shorter significand, whatever the block. Only values become
subnormal that are small next to the amax of their block. So the histogram gives the sums, and the tensor is read for those
few others. If they are not few, to cast each value costs less.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba.np.numpy_support import carray

from ...numerics.block_scaling import WHOLE_ROW, Block, BlockRule, matrix
from ...numerics.formats import FloatFormat
from ...numerics.histogram import BINS, Histogram, infinity_bin, magnitudes_of
from ...numerics.metrics import QuantizationSums
from ..memory import address_of
from .block_scales import Tables, bounds, tables_at, tables_of, tables_of_one_level
from .casts import add, cast, digits, rounded
from .jit import AHEAD, JOB, Work, counts_at, jit, prefetch, values_at, work
from .panels import (
    MANY,
    RESULTS,
    TOLD,
    Layout,
    PanelJob,
    add_up,
    amax_of_panel,
    largest_of_blocks,
    next_panels,
    operand_of,
    panel_at,
    patch,
    results_of,
    rules_of,
    tell,
)
from .simd import PANEL, below, lowest_bit, magnitude_of, no_sums, total
from .threads import ZeroedArrays, share_out


@functools.cache
def sums_of_blocks(wide: int, half: bool) -> Work:
    """The sums of `QuantizationSums`; the job is `PanelJob`'s.

    Compiled for blocks of this width, a multiple of 16, of float16 or else of bfloat16.
    """
    # Numbers only: a compiled function among them has another name in each process, and would not be found on disk.
    per_panel, step = PANEL // wide, 16 if half or wide < 32 else 32

    @work
    def sums_of_panels(job: int) -> None:
        words, layout, high, infinity = operand_of(job)
        tables, clamps, _ = rules_of(job)
        scale_inv, scale, lost, _, spacing = tables_at(tables)
        room, scales, inverses = np.empty(2 * PANEL + 16, np.float32), np.zeros(per_panel, np.float32), np.zeros(per_panel)
        amax = np.zeros(max(32, per_panel), np.uint16)
        patched, tops, gone = np.empty(high * PANEL, np.uint16), np.empty(PANEL, np.uint16), np.zeros(per_panel, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q, spare = x + 4 * PANEL, np.int64(patched.ctypes.data)
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counted, summed = (0, 0), no_sums()
            for p in range(first, end):
                panel = panel_at(layout, high, p)
                at, rows, columns = panel
                amax_of_panel(words, layout, panel, infinity, wide, amax, tops)
                finite = largest_of_blocks(amax, per_panel) < infinity
                row, stride = np.int64(words.ctypes.data) + 2 * at, 2 * layout[2]
                if not finite or columns % max(step, wide):
                    patch(words, at, layout[2], rows, columns, infinity, patched)
                    row, stride = spare, 2 * PANEL
                following = at + max(PANEL, AHEAD // high)
                for b in range((columns + wide - 1) // wide):
                    pattern = amax[b] & 0x7FFF
                    scales[b], inverses[b], gone[b] = scale[pattern], scale_inv[pattern], lost[pattern]
                for _ in range(rows):
                    if clamps or not finite:
                        for i in range(0, columns, step):
                            prefetch(words, following + i)
                            by, most = scales[i // wide], gone[i // wide]
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, True)
                    else:
                        for i in range(0, columns, step):
                            prefetch(words, following + i)
                            by, most = scales[i // wide], gone[i // wide]
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, False)
                    for i in range(0, columns, step):
                        by_inverse = inverses[i // wide]
                        for j in range(i, i + step, 16):
                            summed = add(x + 4 * j, q + 4 * j, by_inverse, summed)
                    row += stride
                    following += layout[2]
            tell(job, share, counted, (total(summed[0]), total(summed[1]), total(summed[2])), 0)
        room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_panels


#: columns whose amax is found at once
_WIDE = 32


@functools.cache
def sums_of_rows(half: bool) -> Work:
    """The sums of `QuantizationSums`; the job is `PanelJob`'s, whose panels are rows. Of float16 or else of bfloat16."""
    step = 16 if half else 32

    @work
    def sums_of_whole_rows(job: int) -> None:
        words, layout, _, infinity = operand_of(job)
        tables, clamps, _ = rules_of(job)
        scale_inv, scale, lost, _, spacing = tables_at(tables)
        room, amax = np.empty(2 * PANEL + 16, np.float32), np.zeros(PANEL // _WIDE, np.uint16)
        patched, tops = np.empty(PANEL, np.uint16), np.empty(PANEL, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q, spare, columns = x + 4 * PANEL, np.int64(patched.ctypes.data), layout[1]
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counted, summed = (0, 0), no_sums()
            for r in range(first, end):
                pattern, finite = np.int64(0), True
                for begin in range(0, columns, PANEL):
                    panel = r * layout[2] + begin, 1, min(PANEL, columns - begin)
                    amax_of_panel(words, layout, panel, infinity, _WIDE, amax, tops)
                    for b in range((panel[2] + _WIDE - 1) // _WIDE):
                        magnitude = np.int64(amax[b] & 0x7FFF)
                        pattern = magnitude if magnitude > pattern else pattern
                        finite = finite and amax[b] < infinity
                by, inverse, most = scale[pattern], scale_inv[pattern], lost[pattern]
                for begin in range(0, columns, PANEL):
                    at, there = r * layout[2] + begin, min(PANEL, columns - begin)
                    row = np.int64(words.ctypes.data) + 2 * at
                    if not finite or there % step:
                        patch(words, at, layout[2], 1, there, infinity, patched)
                        row = spare
                    for i in range(0, there, step):
                        if clamps or not finite:
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, True)
                        else:
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, False)
                    for i in range(0, there, step):
                        for j in range(i, i + step, 16):
                            summed = add(x + 4 * j, q + 4 * j, inverse, summed)
            tell(job, share, counted, (total(summed[0]), total(summed[1]), total(summed[2])), 0)
        room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_whole_rows


#: values one thread gets at the least
GRAIN = 1 << 18
_small = ZeroedArrays((BINS,), np.int64)


#: values that are looked at before it is asked how many of them are such others
_AT_LEAST = 1 << 13
#: of how many values one may be
_FEW = 16


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


@functools.cache
def sums_of_small(wide: int, half: bool) -> Work:
    """The sums of those others, and how often which occur, unless they are not few; the job is `PanelJob`'s.

    Compiled for blocks of this width, a multiple of 32, of float16 or else of bfloat16.
    """
    per_panel = PANEL // wide

    @work
    def sums_of_panels(job: int) -> None:
        words, layout, high, infinity = operand_of(job)
        tables, _, small_counts = rules_of(job)
        scale_inv, scale, lost, floor, (limit, beyond, lowest, anchor) = tables_at(tables)
        amax, floors = np.zeros(max(32, per_panel), np.uint16), np.empty(per_panel, np.uint32)
        patched, tops = np.empty(high * PANEL if layout[1] % 32 else 1, np.uint16), np.empty(PANEL, np.uint16)
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counts = carray(counts_at(small_counts + share * 8 * 32768), 32768)
            underflows = overflows = seen = held = 0
            error2 = xq = q2 = 0.0
            top = np.int64(0)
            for p in range(first, end):
                panel = panel_at(layout, high, p)
                at, rows, columns = panel
                amax_of_panel(words, layout, panel, infinity, wide, amax, tops)
                for b in range((columns + wide - 1) // wide):
                    pattern = np.int64(amax[b] & 0x7FFF)
                    floors[b] = np.uint32(max(floor[pattern], 1) - 1) * np.uint32(0x10001)
                    top = max(top, pattern)
                row, stride = np.int64(words.ctypes.data) + 2 * at, 2 * layout[2]
                if columns % 32:
                    patch(words, at, layout[2], rows, columns, infinity, patched)
                    row, stride = np.int64(patched.ctypes.data), 2 * PANEL
                following = at + max(PANEL, 4 * AHEAD // high)
                for _ in range(rows):
                    for i in range(0, columns, 32):
                        prefetch(words, following + i)
                        small = below(row + 2 * i, floors[i // wide])
                        if small:
                            group, block = carray(values_at(row + 2 * i), 32), amax[i // wide] & 0x7FFF
                            by, inverse, gone = scale[block], scale_inv[block], lost[block]
                            while small:
                                pattern = np.int64(group[lowest_bit(small)] & 0x7FFF)
                                small &= small - 1
                                counts[pattern] += 1
                                value = magnitude_of(pattern, half)
                                scaled = value * by
                                x, q = np.float64(value), rounded(min(scaled, limit), lowest, anchor) * inverse
                                error2 += (x - q) * (x - q)
                                xq += x * q
                                q2 += q * q
                                underflows += pattern <= gone
                                overflows += scaled > beyond
                                held += 1
                    row += stride
                    following += layout[2]
                seen += rows * columns
                if seen > _AT_LEAST and held * _FEW > seen:
                    top = np.int64(MANY)
                    break
            tell(job, share, (underflows, overflows), (error2, xq, q2), top)
        patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_panels


@jit
def add_shortened(  # type: ignore[no-untyped-def]
    job, small, counts, n, infinity, magnitude, anchor
):
    """Add to the sums of the first share those of what a histogram counts, with significands cut short.

    Args:
        job: whose results were added up.
        small: see `PanelJob`; zeros again afterwards.
        counts: address of the histogram's, int64 [32768].
        n: how many values it has counted.
        magnitude: float32 [32768], the values.
        anchor: 1.5 * 2^(52 - digits of the significand), see `rounded`.
    """
    integers, sums = results_of(job, 0)
    table = carray(counts_at(counts), 32768)
    left, i = n - table[0] - table[infinity:].sum(), min(integers[2], infinity - 1)
    while left > 0 and i > 0:
        count = table[i]
        if count:
            left -= count
            for share in range(len(small)):
                count -= small[share, i]
                small[share, i] = 0
            x = np.float64(magnitude[i])
            binade = np.float64(x).view(np.int64) & 0x7FF0000000000000
            above = np.int64(binade).view(np.float64) * anchor
            q = (x + above) - above
            sums[0] += count * ((x - q) * (x - q))
            sums[1] += count * (x * q)
            sums[2] += count * (q * q)
        i -= 1

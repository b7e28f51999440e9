"""Panels of blocks of a 16-bit operand in CPU memory: where they lie, and the amax of each block.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from .jit import JOB, add_to, counts_at, doubles_at, jit, job_at, next_share, values_at
from .simd import PANEL, amaxes, larger, largest, magnitudes, patterns, store

Words = npt.NDArray[np.uint16]

#: rows, columns, values from one row to the next
Layout = tuple[int, int, int]

#: numbers that a share writes: underflows, overflows, the pattern of the amax or `MANY`, `TOLD`, and the three sums, float64
RESULTS = 7
#: there is no amax, since the share is not worth finishing
MANY = 1 << 15
TOLD = 1

#: rows whose maxima are found together, which saves storing them in between
_ROWS = 8

#: the sign bit, which an amax has no use for: its block holds NaN
_NAN = 0x8000


class PanelJob(NamedTuple):
    """The numbers of a job over the panels of an operand, in order, see `share_out`; arrays by their addresses."""

    address: int
    #: a `Layout`
    rows: int
    columns: int
    stride: int
    #: rows of a block
    high: int
    panels: int
    #: infinity's pattern
    infinity: int
    #: memory of `Tables`
    tables: int
    #: as in `Tables`
    clamps: int
    #: int64 [shares, 32768], zeros; how often values that become subnormal occur is added
    small: int = 0


@jit
def operand_of(job):  # type: ignore[no-untyped-def]
    """The values of an operand, its layout, rows of a block, infinity's pattern."""
    numbers = job_at(job)
    layout = numbers[3], numbers[4], numbers[5]
    return carray(values_at(numbers[2]), (layout[0] - 1) * layout[2] + layout[1]), layout, numbers[6], numbers[8]


@jit
def rules_of(job):  # type: ignore[no-untyped-def]
    """Address of the tables, whether there is something to clamp, address of counts."""
    numbers = job_at(job)
    return numbers[9], numbers[10] != 0, numbers[11]


@jit
def next_panels(job):  # type: ignore[no-untyped-def]
    """A share that nobody else has, the first of its panels and their end; a share of -1 where none is left."""
    numbers, share = job_at(job), next_share(job)
    shares, panels = numbers[1], numbers[7]
    return (share, panels * share // shares, panels * (share + 1) // shares) if share < shares else (-1, 0, 0)


@jit
def results_of(job, share):  # type: ignore[no-untyped-def]
    """What a share writes: integers and sums."""
    at = job + 8 * (JOB + RESULTS * share)
    return carray(counts_at(at), 4), carray(doubles_at(at + 32), 3)


@jit
def tell(job, share, counted, sums, amax):  # type: ignore[no-untyped-def]
    """Write down what came out of a share."""
    integers, floats = results_of(job, share)
    integers[0], integers[1], integers[2], integers[3] = counted[0], counted[1], amax, TOLD
    floats[0], floats[1], floats[2] = sums
    if amax >= MANY:
        add_to(job, 1 << 32)  # nobody needs to begin another


@jit
def add_up(job, shares):  # type: ignore[no-untyped-def]
    """Add what came out of all shares to that of the first; of amaxes the largest, and whether all have told."""
    mine, sums = results_of(job, 0)
    for share in range(1, shares):
        integers, floats = results_of(job, share)
        mine[2], mine[3] = max(mine[2], integers[2]), min(mine[3], integers[3])
        for i in range(2):
            mine[i] += integers[i]
        for i in range(3):
            sums[i] += floats[i]


@jit
def _amax_but_nan(words: Words, at: int, stride: int, rows: int, columns: int, infinity: int) -> int:
    """The pattern of the largest magnitude; NaN counts for nothing."""
    amax = 0
    for r in range(rows):
        for c in range(columns):
            magnitude = words[at + r * stride + c] & 0x7FFF
            if amax < magnitude <= infinity:
                amax = magnitude
    return amax


@jit
def panel_at(layout: Layout, high: int, p: int) -> tuple[int, int, int]:
    """Where panel `p` begins, how many rows it has and how many columns."""
    rows, columns, stride = layout
    across = (columns + PANEL - 1) // PANEL
    row, column = p // across * high, p % across * PANEL
    return row * stride + column, min(high, rows - row), min(PANEL, columns - column)


@jit
def patch(words: Words, at: int, stride: int, rows: int, columns: int, infinity: int, patched: Words) -> None:
    """Copy a panel, with zeros for what is not finite or not there."""
    patched[: rows * PANEL] = 0
    for r in range(rows):
        for c in range(columns):
            word = words[at + r * stride + c]
            patched[r * PANEL + c] = word if word & 0x7FFF < infinity else 0


@jit
def _largest_of_columns(words: Words, at: int, stride: int, rows: int, columns: int, tops: Words) -> None:
    """The patterns of the largest magnitudes of the columns of a panel, NaN the largest, and zeros up to its width."""
    to, whole, together = np.int64(tops.ctypes.data), columns // 32 * 32, rows // _ROWS * _ROWS
    tops[:] = 0
    for r in range(0, together, _ROWS):
        row = np.int64(words.ctypes.data) + 2 * (at + r * stride)
        for c in range(0, whole, 32):
            top = patterns(to + 2 * c)
            for k in range(_ROWS):
                top = larger(top, magnitudes(row + 2 * (k * stride + c)))
            store(top, to + 2 * c)
    for r in range(rows):
        for c in range(whole if r < together else 0, columns):
            tops[c] = max(tops[c], words[at + r * stride + c] & 0x7FFF)


@jit
def largest_of_blocks(  # type: ignore[no-untyped-def]
    amax, blocks
):
    """The largest of so many patterns, or of 32, of NaN the sign as well."""
    base = np.int64(amax.ctypes.data)
    top = patterns(base)
    for b in range(32, blocks, 32):
        top = larger(top, patterns(base + 2 * b))
    return np.int64(largest(top))


@jit
def amax_of_panel(  # type: ignore[no-untyped-def]
    words, layout, panel, infinity, wide, amax, tops
):
    """Find the patterns of the amax of a panel's blocks, with the sign bit where a block holds NaN.

    Args:
        amax: uint16, room for 32 at the least.
        tops: uint16 [PANEL], to work with.
    """
    at, rows, columns = panel
    start = np.int64(words.ctypes.data) + 2 * at
    if rows > 1 or columns < PANEL:
        _largest_of_columns(words, at, layout[2], rows, columns, tops)
        start = np.int64(tops.ctypes.data)
    amaxes(start, np.int64(amax.ctypes.data), wide)
    if largest_of_blocks(amax, PANEL // wide) > infinity:
        for b in range((columns + wide - 1) // wide):
            if amax[b] > infinity:
                there = min(wide, columns - b * wide)
                amax[b] = _NAN | _amax_but_nan(words, at + b * wide, layout[2], rows, there, infinity)

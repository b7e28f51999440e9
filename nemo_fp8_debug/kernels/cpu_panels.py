"""Panels of blocks of a 16-bit operand in CPU memory: where they lie, and the amax of each block.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .cpu import jit
from .cpu_lanes import PANEL, amaxes, larger, largest, magnitudes, patterns, store

Words = npt.NDArray[np.uint16]

#: rows, columns, values from one row to the next
Layout = tuple[int, int, int]

#: the sign bit, which an amax has no use for: its block holds NaN
_NAN = 0x8000


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
    base, to, whole = np.int64(words.ctypes.data) + 2 * at, np.int64(tops.ctypes.data), columns // 32 * 32
    for c in range(0, whole, 32):
        top = magnitudes(base + 2 * c)
        for r in range(1, rows):
            top = larger(top, magnitudes(base + 2 * (r * stride + c)))
        store(top, to + 2 * c)
    tops[whole:] = 0
    for r in range(rows):
        for c in range(whole, columns):
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

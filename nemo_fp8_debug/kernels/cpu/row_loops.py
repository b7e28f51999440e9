"""The loop over the rows of a 16-bit operand in CPU memory, each of which has a scale: a block as wide as the matrix.

A row is read twice, for its amax and for the sums, the second time from a cache unless it is longer than that.
"""

from __future__ import annotations

import functools

import numpy as np

from .block_scales import tables_at
from .casts import add, cast
from .jit import Work, work
from .panels import amax_of_panel, next_panels, operand_of, patch, rules_of, tell
from .simd import PANEL, no_sums, total

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

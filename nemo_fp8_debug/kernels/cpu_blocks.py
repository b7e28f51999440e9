"""The sums of a 16-bit operand's error under block scales, in CPU memory.

The amax of a block is a magnitude of its dtype, one of 32,768, so its scale is looked up. That leaves loops without a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from ..numerics import blocks
from ..numerics.blocks import Block, BlockRule, matrix
from ..numerics.figures import QuantizationSums
from ..numerics.formats import FloatFormat
from ..numerics.sketch import DTYPES, infinity_bin
from .cpu import pool
from .cpu_block_loops import Layout, bounds, kernels
from .cpu_block_scales import tables_of, tables_of_one_level
from .cpu_casts import digits, spacing
from .cpu_lanes import PANEL
from .memory import address_of

T = TypeVar("T")

#: values one thread gets at the least
GRAIN = 1 << 18


def _shared_out(task: Callable[[tuple[int, int]], T], panels: int, values: int) -> list[T]:
    """What `task` gives for each thread's share of so many panels; the first share is done in this thread."""
    threads = torch.get_num_threads()
    shares = max(1, min(threads, panels, values // GRAIN))
    mine, *others = [(panels * i // shares, panels * (i + 1) // shares) for i in range(shares)]
    jobs = [pool(threads).submit(task, share) for share in others]
    return [task(mine), *(job.result() for job in jobs)]


def _laid_out(x: torch.Tensor, block: Block) -> tuple[torch.Tensor, Layout]:
    """The tensor in whose memory the values of `x` are, and how a matrix of blocks lies there."""
    columns = x.shape[-1] if x.dim() else 1
    rows, stride, kept = x.numel() // columns, columns, x
    if not x.is_contiguous():
        kept = matrix(x)
        if kept.stride(1) != 1:
            kept = kept.contiguous()
        stride = kept.stride(0) if rows > 1 else columns
    whole = block[0] == 1 and stride == columns and columns % block[1] == 0
    return kept, (1, rows * columns, rows * columns) if whole else (rows, columns, stride)


def quantization_sums_in_blocks(x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat) -> QuantizationSums:
    """As `numerics.blocks.quantization_sums_in_blocks`, of an operand in CPU memory; sums are added up in another order."""
    if x.dtype not in DTYPES or not x.numel():
        return blocks.quantization_sums_in_blocks(x, rule, role, fmt)
    (high, wide), infinity = rule.block(role), infinity_bin(x.dtype)
    kept, layout = _laid_out(x, (high, wide))
    loops, where = kernels(wide, x.dtype == torch.float16), (address_of(kept), layout, high)
    panels = math.ceil(layout[0] / high) * math.ceil(layout[1] / PANEL)
    if rule.two_level:
        # The amax of every block, and zeros up to whole vectors.
        found = np.zeros(-(-panels * (PANEL // wide) // 32) * 32, np.uint16)
        _shared_out(lambda share: loops.amax(*where, share, infinity, found), panels, x.numel())
        smallest, largest = bounds(found)
        tables = tables_of(rule, fmt, x.dtype, min(smallest, largest), largest)
    else:
        tables = tables_of_one_level(rule, fmt, x.dtype)

    def of(share: tuple[int, int]) -> tuple[int, int, float, float, float]:
        amax = found if rule.two_level else np.zeros(max(32, PANEL // wide), np.uint16)
        return loops.sums(*where, share, infinity, amax, rule.two_level, *tables, spacing(fmt), 7 - digits(fmt))

    totals = map(sum, zip(*_shared_out(of, panels, x.numel()), strict=True))
    # Torch's own ways to cut a tensor up, or to make one of a number, take several times as long.
    return QuantizationSums(*(torch.from_numpy(np.array([total])) for total in totals))

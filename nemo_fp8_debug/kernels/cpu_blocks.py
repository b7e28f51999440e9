"""The sums of a 16-bit operand's error under block scales, in CPU memory.

The amax of a block is a magnitude of its dtype, one of 32,768, so its scale is looked up. That leaves loops without a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..numerics.blocks import Block, BlockRule, matrix
from ..numerics.figures import QuantizationSums
from ..numerics.formats import FloatFormat
from ..numerics.sketch import BINS, Sketch, infinity_bin, magnitudes_of
from .cpu import pool
from .cpu_binary_blocks import sums_of_shortened, sums_of_small
from .cpu_block_loops import sums_of_blocks
from .cpu_block_scales import Tables, bounds, tables_of, tables_of_one_level
from .cpu_casts import digits, spacing
from .cpu_lanes import PANEL
from .cpu_panels import Layout
from .memory import address_of

T = TypeVar("T")

#: values one thread gets at the least
GRAIN = 1 << 18
#: the same where most values are only looked at
BINARY_GRAIN = 1 << 21
_HOST = torch.device("cpu")

Sums = tuple[int, int, float, float, float]


class _Panels(NamedTuple):
    """An operand as panels of blocks."""

    #: the tensor in whose memory its values are
    kept: torch.Tensor
    layout: Layout
    block: Block

    @property
    def number(self) -> int:
        return math.ceil(self.layout[0] / self.block[0]) * math.ceil(self.layout[1] / PANEL)

    @property
    def where(self) -> tuple[int, Layout, int]:
        return address_of(self.kept), self.layout, self.block[0]

    def shared_out(self, task: Callable[[tuple[int, int]], T], grain: int) -> list[T]:
        """What `task` gives for each thread's share of the panels; the first share is done in this thread."""
        threads, values = torch.get_num_threads(), self.layout[0] * self.layout[1]
        shares = max(1, min(threads, self.number, values // grain))
        mine, *others = [(self.number * i // shares, self.number * (i + 1) // shares) for i in range(shares)]
        jobs = [pool(threads).submit(task, share) for share in others]
        return [task(mine), *(job.result() for job in jobs)]


def _panels(x: torch.Tensor, block: Block) -> _Panels:
    columns = x.shape[-1] if x.dim() else 1
    rows, stride, kept = x.numel() // columns, columns, x
    if not x.is_contiguous():
        kept = matrix(x)
        if kept.stride(1) != 1:
            kept = kept.contiguous()
        stride = kept.stride(0) if rows > 1 else columns
    whole = block[0] == 1 and stride == columns and columns % block[1] == 0
    return _Panels(kept, (1, rows * columns, rows * columns) if whole else (rows, columns, stride), block)


def quantization_sums_in_blocks(
    x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat, sketch: Sketch
) -> QuantizationSums:
    """As `numerics.blocks.quantization_sums_in_blocks`, in another order of adding up.

    Args:
        x: bfloat16 or float16, not empty, in CPU memory.
        sketch: of `x`.
    """
    panels, counts = _panels(x, rule.block(role)), sketch.counts.data_ptr()
    if rule.two_level:
        tables = tables_of(rule, fmt, x.dtype, *bounds(counts, infinity_bin(x.dtype)))
    else:
        tables = tables_of_one_level(rule, fmt, x.dtype)
    total = (_of_few(panels, tables, fmt, counts) if tables.floor.size else None) or _of_all(panels, tables, fmt)
    # Torch's own ways to cut a tensor up, or to make one of a number, take several times as long.
    return QuantizationSums(*(torch.from_numpy(np.array([sum])) for sum in total))


def _added(parts: list[Sums]) -> Sums:
    return parts[0] if len(parts) == 1 else tuple(map(sum, zip(*parts, strict=True)))  # type: ignore[return-value]


def _of_all(panels: _Panels, tables: Tables, fmt: FloatFormat) -> Sums:
    """Of each value by itself."""
    half, where, infinity = panels.kept.dtype == torch.float16, panels.where, infinity_bin(panels.kept.dtype)
    sums = sums_of_blocks(panels.block[1], half)
    by = tables.scale, tables.scale_inv, tables.lost, tables.clamps, spacing(fmt)
    return _added(panels.shared_out(lambda share: sums(*where, share, infinity, *by), GRAIN))


def _of_few(panels: _Panels, tables: Tables, fmt: FloatFormat, counts: int) -> Sums | None:
    """Of what the sketch has counted, but for values that become subnormal, which are looked for; None if they are many."""
    dtype, where = panels.kept.dtype, panels.where
    sums, infinity = sums_of_small(panels.block[1], dtype == torch.float16), infinity_bin(dtype)
    by = tables.floor, tables.scale, tables.scale_inv, tables.lost, spacing(fmt)

    def of(share: tuple[int, int]) -> tuple[bool, Sums, npt.NDArray[np.int64]]:
        small = np.zeros(BINS, np.int64)
        found = sums(*where, share, infinity, *by, small)
        return found[0], found[1:], small

    few, found, counted = zip(*panels.shared_out(of, BINARY_GRAIN), strict=True)
    if not all(few):
        return None
    small = counted[0] if len(counted) == 1 else np.sum(counted, axis=0)
    anchor = 1.5 * 2.0 ** (52 - digits(fmt))
    others = sums_of_shortened(counts, small, infinity, magnitudes_of(dtype, _HOST).numpy(), anchor)
    return _added([*found, (0, 0, *others)])

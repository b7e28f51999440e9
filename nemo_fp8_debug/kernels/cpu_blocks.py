"""The sums of a 16-bit operand's error under block scales, in CPU memory.

The amax of a block is a magnitude of its dtype, one of 32,768, so its scale is looked up. That leaves loops without a call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..numerics import blocks
from ..numerics.blocks import Block, BlockRule, matrix
from ..numerics.figures import SCALE_ROUNDING, QuantizationSums
from ..numerics.formats import FloatFormat
from ..numerics.sketch import BINS, DTYPES, infinity_bin, magnitudes_of
from .cpu import pool
from .cpu_block_loops import PANEL, Layout, Words, kernels
from .memory import bits_of

T = TypeVar("T")

#: values one thread gets at the least
GRAIN = 1 << 18


class _Tables(NamedTuple):
    """What the amax of a block leads to, by its pattern."""

    scale: npt.NDArray[np.float32]
    scale_inv: npt.NDArray[np.float64]
    #: whether a finite amax can come to lie beyond the format's limit
    clamps: bool


def _tables(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype, patterns: tuple[int, int] = (0, BINS - 1)) -> _Tables:
    """Of the amaxes from the first to the second of `patterns`, which is the whole tensor's where the rule looks at that."""
    first, last = patterns
    amax = magnitudes_of(dtype, torch.device("cpu"))[first : last + 1]
    scales = rule.scales(amax[:, None], amax[-1], fmt, dtype)
    scale, scale_inv = np.zeros(BINS, np.float32), np.zeros(BINS)
    scale_inv[first : last + 1] = scales.scale_inv[:, 0]
    # What stands for zero whatever its codes are is scaled to zero.
    scale[first : last + 1] = torch.where(scales.scale_inv == 0, 0.0, scales.scale)[:, 0]
    scaled = (amax.numpy() * scale[first : last + 1])[: infinity_bin(dtype) - first]
    return _Tables(scale, scale_inv, bool((scaled > fmt.max * SCALE_ROUNDING).any()))


_tables_of_one_level = functools.lru_cache(maxsize=64)(_tables)


def _shared_out(task: Callable[[tuple[int, int]], T], panels: int, values: int) -> list[T]:
    """What `task` gives for each thread's share of so many panels; the first share is done in this thread."""
    threads = torch.get_num_threads()
    shares = max(1, min(threads, panels, values // GRAIN))
    mine, *others = [(panels * i // shares, panels * (i + 1) // shares) for i in range(shares)]
    jobs = [pool(threads).submit(task, share) for share in others]
    return [task(mine), *(job.result() for job in jobs)]


def _laid_out(x: torch.Tensor, block: Block) -> tuple[Words, Layout]:
    """The values of `x` in memory, and how a matrix of blocks lies in them."""
    m = matrix(x)
    rows, columns = m.shape
    if m.stride(1) != 1 or (rows > 1 and m.stride(0) < columns):
        m = m.contiguous()
    stride = m.stride(0) if rows > 1 else columns
    words = bits_of(m.as_strided(((rows - 1) * stride + columns,), (1,)))
    whole = block[0] == 1 and stride == columns and columns % block[1] == 0
    return words, (1, rows * columns, rows * columns) if whole else (rows, columns, stride)


@functools.cache
def _spacing(fmt: FloatFormat) -> tuple[np.float32, ...]:
    """Limit, what lies beyond it, the lowest binade, and what brings values of a binade to multiples of its spacing."""
    digits = math.log2(fmt.min_normal / fmt.min_subnormal)
    return tuple(map(np.float32, (fmt.max, fmt.max * SCALE_ROUNDING, fmt.min_normal, 1.5 * 2 ** (23 - digits))))


def quantization_sums_in_blocks(x: torch.Tensor, rule: BlockRule, role: str, fmt: FloatFormat) -> QuantizationSums:
    """As `numerics.blocks.quantization_sums_in_blocks`, of an operand in CPU memory; sums are added up in another order."""
    if x.dtype not in DTYPES or not x.numel():
        return blocks.quantization_sums_in_blocks(x, rule, role, fmt)
    (high, wide), infinity = rule.block(role), infinity_bin(x.dtype)
    words, layout = _laid_out(x, (high, wide))
    loops, where = kernels(wide, x.dtype == torch.float16), (words, layout, high)
    panels = math.ceil(layout[0] / high) * math.ceil(layout[1] / PANEL)
    if rule.two_level:
        amax = np.zeros(panels * (PANEL // wide), np.uint16)
        bounds = _shared_out(lambda share: loops.amax(*where, share, infinity, amax), panels, x.numel())
        smallest, largest = min(b[0] for b in bounds), max(b[1] for b in bounds)
        tables = _tables(rule, fmt, x.dtype, (min(smallest, largest), largest))
    else:
        tables = _tables_of_one_level(rule, fmt, x.dtype)

    def of(share: tuple[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        counts, sums = np.zeros(2, np.int64), np.zeros(3, np.float64)
        found = amax if rule.two_level else np.zeros(PANEL // wide, np.uint16)
        loops.sums(*where, share, infinity, found, rule.two_level, *tables, _spacing(fmt), counts, sums)
        return counts, sums

    counts, sums = (np.sum(parts, axis=0) for parts in zip(*_shared_out(of, panels, x.numel()), strict=True))
    return QuantizationSums(*torch.from_numpy(counts[:, None]).unbind(), *torch.from_numpy(sums[:, None]).unbind())

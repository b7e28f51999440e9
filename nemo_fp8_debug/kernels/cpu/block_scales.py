"""What the amax of a block leads to, for all magnitudes of a 16-bit dtype that can be one, in CPU memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba.np.numpy_support import carray

from ...numerics.block_scaling import BlockRule
from ...numerics.formats import E4M3, FloatFormat
from ...numerics.histogram import BINS, infinity_bin, magnitudes_of
from ...numerics.metrics import SCALE_ROUNDING
from ...numerics.nvfp4_scaling import NVFP4Scaling
from ...numerics.tensor_scaling import FLT_MAX
from .casts import rounded, spacing
from .histogram import occupied
from .jit import doubles_at, floats_at, jit, values_at

_HOST = torch.device("cpu")
#: of the format of NVFP4's scales
_SPACING = spacing(E4M3)


class Tables(NamedTuple):
    """What the amax of a block leads to, by its pattern."""

    #: the four tables end to end, and behind them `cpu_casts.spacing`
    memory: npt.NDArray[np.uint8]
    #: where that lies
    address: int
    #: whether a finite amax can come to lie beyond the format's limit
    clamps: bool
    #: whether scales are powers of two, so that `floor` is there
    binary: bool = False

    @property
    def scale_inv(self) -> npt.NDArray[np.float64]:
        """[32768]"""
        return self.memory[: 8 * BINS].view(np.float64)

    @property
    def scale(self) -> npt.NDArray[np.float32]:
        """[32768]; 0 where a block is lost."""
        return self.memory[8 * BINS : 12 * BINS].view(np.float32)

    @property
    def lost(self) -> npt.NDArray[np.uint16]:
        """[32768]; the largest pattern that is cast to zero."""
        return self.memory[12 * BINS : 14 * BINS].view(np.uint16)

    @property
    def floor(self) -> npt.NDArray[np.uint16]:
        """[32768]; the pattern from which on the cast of finite values is nothing but a shorter significand."""
        return self.memory[14 * BINS : 16 * BINS].view(np.uint16)


@jit
def tables_at(address: int) -> Any:
    """The tables at the address of their memory: scale_inv, scale, lost, floor; and `cpu_casts.spacing`."""
    by = carray(floats_at(address + 16 * 32768), 4)
    scale_inv, scale = carray(doubles_at(address), 32768), carray(floats_at(address + 8 * 32768), 32768)
    lost, floor = carray(values_at(address + 12 * 32768), 32768), carray(values_at(address + 14 * 32768), 32768)
    return scale_inv, scale, lost, floor, (by[0], by[1], by[2], by[3])


@functools.lru_cache(maxsize=64)
def tables_of_one_level(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype) -> Tables:
    """Of every amax."""
    tables = tables_of(rule, fmt, dtype, 0, BINS - 1)
    return tables._replace(binary=_find_floor(tables, fmt, dtype))


def tables_of(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype, first: int, last: int) -> Tables:
    """Of the amaxes from pattern `first` to `last`, which is the whole tensor's where the rule looks at that."""
    memory = np.empty(16 * BINS + 16, np.uint8)
    memory[16 * BINS :].view(np.float32)[:] = spacing(fmt)
    tables = Tables(memory, memory.ctypes.data, True)
    scale, scale_inv = tables.scale, tables.scale_inv
    scale[0] = scale_inv[0] = 0
    amax = magnitudes_of(dtype, _HOST)[first : last + 1]
    if type(rule) is NVFP4Scaling:
        over = _scales_of_nvfp4(amax.numpy(), fmt.max, scale[first:], scale_inv[first:])
    else:
        scales = rule.scales(amax[:, None], amax[-1], fmt, dtype)
        scale_inv[first : last + 1] = scales.scale_inv[:, 0]
        # What stands for zero whatever its codes are is scaled to zero.
        scale[first : last + 1] = torch.where(scales.scale_inv == 0, 0.0, scales.scale)[:, 0]
        end = min(last + 1, infinity_bin(dtype))
        over = float((amax.numpy()[: end - first] * scale[first:end]).max(initial=0))
    finite = magnitudes_of(dtype, _HOST)[: infinity_bin(dtype)].numpy()
    _largest_lost(scale[first : last + 1], finite, np.float32(fmt.min_subnormal / 2), tables.lost[first:])
    return tables._replace(clamps=over > fmt.max * SCALE_ROUNDING)


def _find_floor(tables: Tables, fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether scales are powers of two."""
    infinity = infinity_bin(dtype)
    scale, amax = tables.scale[:infinity].astype(np.float64), magnitudes_of(dtype, _HOST)[:infinity].double().numpy()
    there = scale > 0
    if (np.frexp(scale[there])[0] != 0.5).any():
        return False
    exact = there & (scale * tables.scale_inv[:infinity] == 1) & (amax * scale <= fmt.max)
    floor = tables.floor
    floor[:] = infinity
    floor[:infinity][exact] = np.searchsorted(amax, fmt.min_normal / scale[exact])
    floor[0] = 0  # a block of zeros has nothing to cast
    return True


@jit
def bounds(address: int, infinity: int) -> tuple[int, int]:
    """The smallest bin of a histogram that is occupied, but 0, and the largest up to infinity; 0 where there is none."""
    bins, counts = np.empty(BINS, np.int64), np.empty(BINS, np.int64)
    end, first = occupied(address, bins, counts), 0
    while end and bins[end - 1] > infinity:
        end -= 1
    if end and not bins[0]:
        first = 1
    return (bins[first], bins[end - 1]) if first < end else (0, 0)


@jit
def _largest_lost(  # type: ignore[no-untyped-def]
    scale, magnitude, half, lost
):
    """The largest pattern whose product with each scale, which fall, is rounded to zero."""
    last = 0
    for i in range(scale.size):
        if scale[i] == 0:
            lost[i] = magnitude.size - 1
            continue
        if not last or magnitude[last] * scale[i] > half:
            last, step = 0, 1 << 14
            while step:
                if last + step < magnitude.size and magnitude[last + step] * scale[i] <= half:
                    last += step
                step >>= 1
        while last + 1 < magnitude.size and magnitude[last + 1] * scale[i] <= half:
            last += 1
        lost[i] = last


@functools.partial(jit, error_model="numpy")
def _scales_of_nvfp4(  # type: ignore[no-untyped-def]
    amax, limit, scale, scale_inv
):
    """As `NVFP4Scaling.scales`, step by step in float32; the last amax is the tensor's.

    Gives the largest product of an amax, finite, and its scale.
    """
    one, largest = np.float32(1), np.float32(FLT_MAX)
    most, _, lowest, anchor = _SPACING
    encode = min(np.float32(most * limit) / amax[-1], largest)
    if not encode > 0:
        encode = one
    factor, decode, over = encode * (one / np.float32(limit)), one / encode, np.float32(0)
    for i in range(amax.size):
        stored = rounded(min(amax[i] * factor, most), lowest, anchor)
        scale_inv[i] = np.float64(stored) / np.float64(encode)
        scale[i] = min(one / (stored * decode), largest) if scale_inv[i] != 0 else np.float32(0)
        if amax[i] < np.inf:
            over = max(over, amax[i] * scale[i])
    return over

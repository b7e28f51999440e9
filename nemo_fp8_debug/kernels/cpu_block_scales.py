"""What the amax of a block leads to, for all magnitudes of a 16-bit dtype that can be one, in CPU memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..numerics.amax import FLT_MAX
from ..numerics.blocks import BlockRule, NVFP4Scaling
from ..numerics.figures import SCALE_ROUNDING
from ..numerics.formats import E4M3, FloatFormat
from ..numerics.sketch import BINS, infinity_bin, magnitudes_of
from .cpu import jit, occupied
from .cpu_casts import rounded, spacing

_HOST = torch.device("cpu")
#: of the format of NVFP4's scales
_SPACING = spacing(E4M3)


class Tables(NamedTuple):
    """What the amax of a block leads to, by its pattern; [32768]."""

    #: 0 where a block is lost
    scale: npt.NDArray[np.float32]
    scale_inv: npt.NDArray[np.float64]
    #: the largest pattern that is cast to zero
    lost: npt.NDArray[np.uint16]
    #: the pattern from which on the cast of finite values is nothing but a shorter significand; empty where scales are not
    #: powers of two
    floor: npt.NDArray[np.uint16]
    #: whether a finite amax can come to lie beyond the format's limit
    clamps: bool


@functools.lru_cache(maxsize=64)
def tables_of_one_level(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype) -> Tables:
    """Of every amax."""
    tables = tables_of(rule, fmt, dtype, 0, BINS - 1)
    return tables._replace(floor=_floor(tables, fmt, dtype))


def tables_of(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype, first: int, last: int) -> Tables:
    """Of the amaxes from pattern `first` to `last`, which is the whole tensor's where the rule looks at that."""
    scale, scale_inv = np.empty(BINS, np.float32), np.empty(BINS)
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
    lost, finite = np.empty(BINS, np.uint16), magnitudes_of(dtype, _HOST)[: infinity_bin(dtype)].numpy()
    _largest_lost(scale[first : last + 1], finite, np.float32(fmt.min_subnormal / 2), lost[first:])
    return Tables(scale, scale_inv, lost, np.empty(0, np.uint16), over > fmt.max * SCALE_ROUNDING)


def _floor(tables: Tables, fmt: FloatFormat, dtype: torch.dtype) -> npt.NDArray[np.uint16]:
    infinity = infinity_bin(dtype)
    scale, amax = tables.scale[:infinity].astype(np.float64), magnitudes_of(dtype, _HOST)[:infinity].double().numpy()
    there = scale > 0
    if (np.frexp(scale[there])[0] != 0.5).any():
        return np.empty(0, np.uint16)
    exact = there & (scale * tables.scale_inv[:infinity] == 1) & (amax * scale <= fmt.max)
    floor = np.full(BINS, infinity, np.uint16)
    floor[:infinity][exact] = np.searchsorted(amax, fmt.min_normal / scale[exact])
    floor[0] = 0  # a block of zeros has nothing to cast
    return floor


@jit
def bounds(address: int, infinity: int) -> tuple[int, int]:
    """The smallest bin of a sketch that is occupied, but 0, and the largest up to infinity; 0 where there is none."""
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

"""What the amax of a block leads to, for all magnitudes of a 16-bit dtype that can be one, in CPU memory."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..numerics.amax import FLT_MAX
from ..numerics.blocks import BlockRule, NVFP4Scaling
from ..numerics.figures import SCALE_ROUNDING
from ..numerics.formats import E4M3, FloatFormat
from ..numerics.sketch import BINS, infinity_bin, magnitudes_of
from .cpu import jit
from .cpu_casts import rounded, spacing

#: of the format of NVFP4's scales
_SPACING = spacing(E4M3)
#: the pattern of infinity in bfloat16
_INFINITY = 0x7F80


class Tables(NamedTuple):
    """What the amax of a block leads to, by its pattern; [32768]."""

    #: 0 where a block is lost
    scale: npt.NDArray[np.float32]
    scale_inv: npt.NDArray[np.float64]
    #: of finite bfloat16: the pattern without significand from which on the cast is nothing but a shorter significand, in
    #: blocks up to this amax; empty where scales are no powers of two
    normal: npt.NDArray[np.uint16]
    #: whether a finite amax can come to lie beyond the format's limit
    clamps: bool


@functools.lru_cache(maxsize=64)
def tables_of_one_level(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype) -> Tables:
    """Of every amax."""
    tables = tables_of(rule, fmt, dtype, 0, BINS - 1)
    return tables._replace(normal=_normal(tables.scale, fmt, dtype))


def tables_of(rule: BlockRule, fmt: FloatFormat, dtype: torch.dtype, first: int, last: int) -> Tables:
    """Of the amaxes from pattern `first` to `last`, which is the whole tensor's where the rule looks at that."""
    scale, scale_inv = np.empty(BINS, np.float32), np.empty(BINS)
    scale[0] = scale_inv[0] = 0
    amax = magnitudes_of(dtype, torch.device("cpu"))[first : last + 1]
    if type(rule) is NVFP4Scaling:
        over = _scales_of_nvfp4(amax.numpy(), fmt.max, scale[first:], scale_inv[first:])
    else:
        scales = rule.scales(amax[:, None], amax[-1], fmt, dtype)
        scale_inv[first : last + 1] = scales.scale_inv[:, 0]
        # What stands for zero whatever its codes are is scaled to zero.
        scale[first : last + 1] = torch.where(scales.scale_inv == 0, 0.0, scales.scale)[:, 0]
        finite = slice(first, min(last + 1, infinity_bin(dtype)))
        over = float((amax.numpy()[: finite.stop - first] * scale[finite]).max(initial=0))
    return Tables(scale, scale_inv, np.empty(0, np.uint16), over > fmt.max * SCALE_ROUNDING)


def _normal(scale: npt.NDArray[np.float32], fmt: FloatFormat, dtype: torch.dtype) -> npt.NDArray[np.uint16]:
    fraction, exponent = np.frexp(scale)
    if dtype != torch.bfloat16 or (fraction[1:_INFINITY] != 0.5).all():
        return np.empty(0, np.uint16)
    amax = magnitudes_of(dtype, torch.device("cpu")).numpy()
    with np.errstate(invalid="ignore"):
        fits = (fraction == 0.5) & (amax * scale <= fmt.max)
    least = np.clip(math.frexp(fmt.min_normal)[1] - exponent + 127, 1, 255) << 7
    least[0] = 1 << 7  # a block of zeros has nothing to cast
    return np.maximum.accumulate(np.where(fits, least, _INFINITY)[:_INFINITY]).astype(np.uint16)


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

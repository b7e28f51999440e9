"""What the kernels of sums have to know of a dtype and a format, as numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ...numerics.formats import FloatFormat
from ...numerics.histogram import infinity_bin
from ...numerics.metrics import SCALE_ROUNDING

#: digits of a float32's mantissa
_DIGITS = 23


class Values(NamedTuple):
    """What the patterns of a dtype mean.

    Shifted to where a float32 has its exponent, a magnitude is a value of that one but for a power of two, since
    exponents are biased otherwise. Subnormals are no exception.
    """

    #: the pattern of infinity
    infinity: np.uint32
    #: how far to shift, and the power of two
    shift: np.uint32
    lift: np.float32

    @classmethod
    def of(cls, dtype: torch.dtype) -> Values:
        """Of torch.bfloat16 or torch.float16."""
        kind = torch.finfo(dtype)
        digits, bias = -int(math.log2(kind.eps)), 1 - int(math.log2(kind.tiny))
        return cls(
            np.uint32(infinity_bin(dtype)),
            np.uint32(_DIGITS - digits),
            np.float32(2.0 ** (127 - bias)),
        )


class Codes(NamedTuple):
    """How a value becomes a code: added to 1.5 * 2^23 spacings of the format, float32's own rounding does it."""

    #: largest value, and where overflow begins
    limit: np.float32
    beyond: np.float32
    #: smallest normal value, as bits of a float32
    lowest: np.uint32
    #: 1.5 * 2^23 spacings, of values between 1 and 2
    anchor: np.float32
    one: np.float64

    @classmethod
    def of(cls, fmt: FloatFormat) -> Codes:
        """Of a format whose 1.5 * 2^23 spacings are a float32 up to its max: E4M3, E5M2, E2M1 or FP16, and not BF16."""
        limit = np.float32(fmt.max)
        return cls(
            limit,
            limit * np.float32(SCALE_ROUNDING),
            np.float32(fmt.min_normal).view(np.uint32),
            np.float32(1.5 * 2.0**_DIGITS * fmt.min_subnormal / fmt.min_normal),
            np.float64(1),
        )

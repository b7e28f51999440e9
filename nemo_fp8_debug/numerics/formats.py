"""Number formats, the saturating cast that all metrics and the emulation use, and codes that an engine stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

#: relative rounding error of a scale; a value this close to the middle between two codes may become either code
_SLACK = 2.0**-20
#: The amax times its own float32 scale may exceed the format's max by one unit in the last place.
SCALE_ROUNDING = 1 + 2.0**-22
#: how many values are processed at once; bounds the float64 temporaries to some tens of MiB
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format and the torch dtype that represents its values."""

    name: str
    #: torch's dtype of the format, or a wider dtype for E2M1, which torch lacks; its cast rounds to nearest, ties to even
    dtype: torch.dtype
    #: largest finite magnitude; a saturating cast clamps to it
    max: float
    #: smallest normal magnitude
    min_normal: float
    #: smallest non-zero magnitude; values up to half of this magnitude round to zero
    min_subnormal: float
    #: number of bits of one value
    bits: int

    @cached_property
    def overflow_limit(self) -> float:
        """Largest magnitude of a scaled float32 value that is no overflow, as a float32 value."""
        return float(torch.tensor(self.max, dtype=torch.float32) * SCALE_ROUNDING)


#: OCP FP8 E4M3 (no infinity, one NaN code per sign): OCP 8-bit Floating Point Specification 1.0, table 1
E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 8)
#: OCP FP8 E5M2 (IEEE-like, with infinities)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 8)
#: OCP FP4 E2M1 (neither infinity nor NaN): OCP Microscaling Formats (MX) Specification 1.0, table 3
E2M1 = FloatFormat("e2m1", torch.bfloat16, 6.0, 1.0, 0.5, 4)
BF16 = FloatFormat("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**-126, 2.0**-133, 16)
FP16 = FloatFormat("fp16", torch.float16, 65504.0, 2.0**-14, 2.0**-24, 16)

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, BF16, FP16)}


def saturating_cast(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round `x` to the nearest value of `fmt`, ties to even. Infinities become the largest finite value, NaN stays NaN.

    This is the rule of NVIDIA's conversion with `__NV_SATFINITE`, which Transformer Engine uses. E2M1 has no NaN, so NaN
    becomes 6. We clamp first because torch's casts beyond the range differ between versions (NaN, infinity or saturation).

    Args:
        x: any shape, float32.

    Returns:
        A tensor of the same shape in `fmt.dtype`.
    """
    clamped = x.clamp(-fmt.max, fmt.max)
    return _nearest_e2m1(clamped).to(fmt.dtype) if fmt == E2M1 else clamped.to(fmt.dtype)


def decode_codes(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the values of a format's codes.

    Args:
        codes: any shape, in the dtype that `saturating_cast` returns.

    Returns:
        A float32 tensor of the same shape and strides.
    """
    if fmt.bits != 8 or not codes.is_cpu or not codes.is_contiguous():
        return codes.float()
    # We look values up because torch converts E4M3 one value at a time on a CPU, which takes seven times as long.
    table = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def _nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 value of each x in [-6, 6]. `round` rounds ties to even multiples of the spacing."""
    magnitude = x.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.where(x.isnan(), E2M1.max, (x / spacing).round() * spacing)


def round_up_to_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 code of the smallest power of two that is at least `x`: 2^(code - 127), code 255 for NaN.

    PTX's instruction `cvt.rp.satfinite.ue8m0x2.f32`, which Transformer Engine uses, does the same. The OCP MX specification
    itself rounds down (Microscaling Formats Specification 1.0, section 6.3), so the largest value of a block may overflow.

    Args:
        x: any shape, float32, not negative.

    Returns:
        uint8 of the same shape. Values above 2^127, including infinity, become 2^127.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Code 0 represents 2^-127, so subnormals up to 2^-127 are not rounded up to code 1.
    above = torch.where(exponent == 0, mantissa > 1 << 22, mantissa > 0)
    code = (exponent + above).clamp_max(254)
    return torch.where(x.isnan(), 255, code).to(torch.uint8)


def decode_e8m0(code: torch.Tensor) -> torch.Tensor:
    """Return the value of an E8M0 code, float64: 2^(code - 127), NaN for 255."""
    value = (code.to(torch.int64) + (1023 - 127) << 52).view(torch.float64)
    return torch.where(code == 255, torch.nan, value)


@dataclass(frozen=True)
class DecodedCodes:
    """The values of the codes that an engine stores."""

    #: values, float32
    values: torch.Tensor
    #: bool, whether each code is the format's largest
    at_limit: torch.Tensor
    #: format of the codes; None if they are stored as values
    format: FloatFormat | None = None
    #: returns the factor that turns codes into values, a scalar or in the shape of `values`
    scale_inv: Callable[[], torch.Tensor] | None = None

    def slice_values(self, start: int, n: int) -> DecodedCodes:
        """Return the `n` values from index `start` on, flattened to one dimension."""
        made, values, at_limit = self.scale_inv, self.values.reshape(-1), self.at_limit.reshape(-1)

        def scale_inv() -> torch.Tensor:
            assert made is not None
            whole = made()
            return whole if whole.dim() == 0 else whole.reshape(-1)[start : start + n]

        of_part = scale_inv if made else None
        return DecodedCodes(values[start : start + n], at_limit[start : start + n], self.format, of_part)


def is_nearest_code(stored: DecodedCodes, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return whether each code is the nearest to its value under the stored scale, as a bool scalar on the device of `x`.

    A cast may also round a value to `dtype` first, and then round the result to a code.

    Args:
        x: float32, with as many values as there are codes.
        dtype: dtype that the weight would have without codes.

    Example:
        >>> from nemo_fp8_debug.numerics.formats import E4M3
        >>> x = torch.linspace(-1, 1, 9)
        >>> codes = DecodedCodes(x.to(torch.float8_e4m3fn).float(), x > 448, E4M3, lambda: torch.tensor(1.0))
        >>> bool(is_nearest_code(codes, x, torch.bfloat16)), bool(is_nearest_code(codes, 1.1 * x, torch.bfloat16))
        (True, False)
    """
    if stored.format is None or stored.scale_inv is None:
        return (stored.values.reshape(-1) == x.reshape(-1).to(dtype).float()).all()
    scale_inv = stored.scale_inv().float()
    parts = scale_inv.expand_as(stored.values).reshape(-1), stored.values.reshape(-1), x.reshape(-1)
    right = [
        (_is_nearest(q, v, s, stored.format) | _is_nearest(q, v.to(dtype).float(), s, stored.format)).all()
        for s, q, v in zip(*(part.split(_CHUNK) for part in parts), strict=True)
    ]
    return torch.stack(right).all() if right else torch.ones((), dtype=torch.bool, device=x.device)


def _is_nearest(q: torch.Tensor, x: torch.Tensor, scale_inv: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    nearest = decode_codes(saturating_cast(x / scale_inv, fmt), fmt) * scale_inv
    return (q == x) | ((q - x).abs() <= (nearest - x).abs() + _SLACK * x.abs()) | ~x.isfinite() | ~q.isfinite()

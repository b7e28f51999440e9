"""What codes stand for that an engine has stored, beside the values that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .formats import FloatFormat, saturating_cast
from .formats import decoded as code_values
from .metrics import SCALE_ROUNDING, QuantizationSums, sums_of_values

#: how far a scale may be rounded, as a share of a value: between two codes either may be meant
_SLACK = 2.0**-20
#: values handled at once; bounds the float64 temporaries to some tens of MiB
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Decoded:
    """What codes stand for that something else has made."""

    #: float32
    values: torch.Tensor
    #: bool, whether a code is the format's largest
    at_limit: torch.Tensor
    #: of the codes; None: they are values themselves
    format: FloatFormat | None = None
    #: makes what codes are multiplied by: a scalar, or as `values`
    scale_inv: Callable[[], torch.Tensor] | None = None

    def part(self, start: int, n: int) -> Decoded:
        """`n` values of it, flat."""
        made, values, at_limit = self.scale_inv, self.values.reshape(-1), self.at_limit.reshape(-1)

        def scale_inv() -> torch.Tensor:
            assert made is not None
            whole = made()
            return whole if whole.dim() == 0 else whole.reshape(-1)[start : start + n]

        of_part = scale_inv if made else None
        return Decoded(values[start : start + n], at_limit[start : start + n], self.format, of_part)


def is_cast_of(decoded: Decoded, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether each code is a nearest one to its value under the scale that is stored; bool scalar, on x's device.

    A cast may round a value to the dtype that the weight would have without codes before it rounds it to a code.

    Args:
        x: float32, of as many values as there are codes.
        dtype: of the weight without codes.

    Example:
        >>> from nemo_fp8_debug.numerics.formats import E4M3
        >>> x = torch.linspace(-1, 1, 9)
        >>> codes = Decoded(x.to(torch.float8_e4m3fn).float(), x > 448, E4M3, lambda: torch.tensor(1.0))
        >>> bool(is_cast_of(codes, x, torch.bfloat16)), bool(is_cast_of(codes, 1.1 * x, torch.bfloat16))
        (True, False)
    """
    if decoded.format is None or decoded.scale_inv is None:
        return (decoded.values.reshape(-1) == x.reshape(-1).to(dtype).float()).all()
    scale_inv = decoded.scale_inv().float()
    parts = scale_inv.expand_as(decoded.values).reshape(-1), decoded.values.reshape(-1), x.reshape(-1)
    right = [
        (_is_nearest(q, v, s, decoded.format) | _is_nearest(q, v.to(dtype).float(), s, decoded.format)).all()
        for s, q, v in zip(*(part.split(_CHUNK) for part in parts), strict=True)
    ]
    return torch.stack(right).all() if right else torch.ones((), dtype=torch.bool, device=x.device)


def _is_nearest(q: torch.Tensor, x: torch.Tensor, scale_inv: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    nearest = code_values(saturating_cast(x / scale_inv, fmt), fmt) * scale_inv
    return (q == x) | ((q - x).abs() <= (nearest - x).abs() + _SLACK * x.abs()) | ~x.isfinite() | ~q.isfinite()


def quantization_sums_of_codes(x: torch.Tensor, decoded: Decoded) -> QuantizationSums:
    """Sums (one row, on x's device) of values and the codes that stand for them; no host synchronization.

    Args:
        x: float32, of as many values as there are codes.
    """
    values, codes, limits = (part.reshape(-1).split(_CHUNK) for part in (x, decoded.values, decoded.at_limit))

    def of(x: torch.Tensor, q: torch.Tensor, at_limit: torch.Tensor) -> QuantizationSums:
        finite = x.isfinite() & q.isfinite()
        x, q = (torch.where(finite, part, 0.0) for part in (x, q))
        beyond = at_limit & (x.abs() > q.abs() * SCALE_ROUNDING)
        return sums_of_values(x, beyond, q.double(), 1.0, lambda v: v.sum()[None])

    return QuantizationSums.concat([of(*parts) for parts in zip(values, codes, limits, strict=True)]).total()

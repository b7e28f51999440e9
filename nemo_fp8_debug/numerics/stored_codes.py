"""What codes stand for that an engine has stored, beside the values that they were made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .metrics import SCALE_ROUNDING, QuantizationSums, sums_of_values

#: values handled at once; bounds the float64 temporaries to some tens of MiB
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Decoded:
    """What codes stand for that something else has made."""

    #: float32
    values: torch.Tensor
    #: bool, whether a code is the format's largest
    at_limit: torch.Tensor

    def part(self, start: int, n: int) -> Decoded:
        """`n` values of it, flat."""
        return Decoded(self.values.reshape(-1)[start : start + n], self.at_limit.reshape(-1)[start : start + n])


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

"""Tensors of every kind that a GEMM operand can be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from nemo_fp8_debug.numerics.histogram import BINS

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Each of the 65,536 values of a 16-bit dtype, once."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def random_patterns(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of random bits; NaN and infinities among them."""
    bits = torch.randint(-(1 << 15), 1 << 15, (n,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _subnormal(dtype: torch.dtype) -> torch.Tensor:
    mantissa = round(1 / torch.finfo(dtype).eps)
    bits = torch.arange(2000, dtype=torch.int32) % mantissa
    return torch.cat([bits, bits - (1 << 15)]).to(torch.int16).view(dtype)


def _nonfinite(dtype: torch.dtype) -> torch.Tensor:
    x = _normal(1500).to(dtype)
    x[3::7], x[4::11], x[5::13] = torch.nan, torch.inf, -torch.inf
    return x


KINDS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "random": lambda dtype: _normal(61, 33).to(dtype),
    "heavy-tailed": lambda dtype: (_normal(2000).pow(3).exp() * _normal(2000).sign()).to(dtype),
    "subnormal": _subnormal,
    "zero": lambda dtype: torch.tensor([0.0, -0.0]).repeat(50).to(dtype),
    "constant": lambda dtype: torch.full((700,), -0.3, dtype=dtype),
    "mostly-zero": lambda dtype: torch.where(_normal(1000) > 2, _normal(1000), 0.0).to(dtype),
    "non-finite": _nonfinite,
    "only-nan": lambda dtype: torch.full((9,), torch.nan, dtype=dtype),
    "only-inf": lambda dtype: torch.full((9,), -torch.inf, dtype=dtype),
    "empty": lambda dtype: torch.zeros(0, 4, dtype=dtype),
    "0-dim": lambda dtype: torch.tensor(-1.7, dtype=dtype),
    "transposed": lambda dtype: _normal(40, 51).to(dtype).t(),
    "permuted": lambda dtype: _normal(5, 6, 70).to(dtype).permute(2, 0, 1),
    "strided": lambda dtype: _normal(90, 50).to(dtype)[::3, 1::2],
    "expanded": lambda dtype: _normal(1, 37).to(dtype).expand(21, 37),
    "requires-grad": lambda dtype: _normal(300).to(dtype).requires_grad_(),
}


def counted(x: torch.Tensor) -> npt.NDArray[np.int64]:
    """The counts that a histogram of a 16-bit tensor must hold."""
    bits = x.detach().contiguous().reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return np.bincount(bits & 0x7FFF, minlength=BINS)

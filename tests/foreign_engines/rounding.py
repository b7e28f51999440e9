"""The casts of foreign engines: INT8 by rows, and E4M3 under a power of two, toward zero."""

from __future__ import annotations

import torch
from foreign_engines.witness import WITNESS

E4M3_MAX = 448.0


def toward_zero(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of FP8, each the nearest whose magnitude is not larger."""
    limit = torch.finfo(dtype).max
    codes = scaled.clamp(-limit, limit).to(dtype)
    away = codes.float().abs() > scaled.abs()
    return (codes.view(torch.uint8) - away.to(torch.uint8)).view(dtype)


def int8_codes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and what a code of 1 stands for, by row."""
    step = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (tensor.float() / step).round().to(torch.int8), step


def int8(module: torch.nn.Module, role: str, tensor: torch.Tensor) -> torch.Tensor:
    codes, step = int8_codes(tensor)
    value = codes.float() * step
    WITNESS.saw(module, role, tensor, value)
    return value.to(tensor.dtype)


def fp8(module: torch.nn.Module, role: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the scale they hold the tensor times."""
    scale = torch.exp2(torch.floor(torch.log2(E4M3_MAX / tensor.float().abs().max().clamp(min=1e-30))) - 2)
    codes = toward_zero(tensor.float() * scale, torch.float8_e4m3fn)
    WITNESS.saw(module, role, tensor, codes.float() / scale, float(scale))
    return codes, scale

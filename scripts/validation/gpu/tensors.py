"""Tensors that kernels are timed with."""

from __future__ import annotations

from collections.abc import Callable

import torch


def normal(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.randn(n, device=device, dtype=torch.bfloat16)


def sparse(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return normal(n, device).relu()


def heavy_tailed(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return normal(n, device) * (3 * torch.randn(n, device=device)).exp().bfloat16()


def one_value(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.full((n,), 1.5, device=device, dtype=torch.bfloat16)


KINDS: list[Callable[..., torch.Tensor]] = [normal, sparse, heavy_tailed, one_value]

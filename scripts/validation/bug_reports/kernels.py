"""A linear layer with kernels of its own, and the casts that such kernels share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_LIMIT, E5M2_LIMIT = 448.0, 57344.0
#: what FP4 (E2M1) can represent, without the sign
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def find_amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, which is never zero."""
    return x.detach().abs().max().clamp(min=1e-30)


def cast(x: torch.Tensor, dtype: torch.dtype = E4M3, limit: float = E4M3_LIMIT) -> torch.Tensor:
    """Return the values that current scaling of the whole tensor represents."""
    scale = limit / find_amax(x)
    return (x * scale).to(dtype).float() / scale


def find_block_scales(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return one inverse scale for every block of a row."""
    amax = x.detach().unflatten(-1, (-1, block)).abs().amax(-1)
    return amax.clamp(min=1e-30) / E4M3_LIMIT


def cast_to_codes(x: torch.Tensor, inverse_scales: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return E4M3 codes of blocks of a row, as floats that are not scaled back."""
    codes = x.unflatten(-1, (-1, block)) / inverse_scales.unsqueeze(-1)
    return codes.clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3).float().flatten(-2)


def scale_back(codes: torch.Tensor, inverse_scales: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return the values of codes."""
    return (codes.unflatten(-1, (-1, block)) * inverse_scales.unsqueeze(-1)).flatten(-2)


def cast_blocks(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return the values that one float32 scale for every block of a row represents."""
    scales = find_block_scales(x, block)
    return scale_back(cast_to_codes(x, scales, block), scales, block)


class Kernels:
    """The three products of a linear layer in FP8, right. Reports override the one that was wrong."""

    def cast_operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return X and W as the products read them."""
        return cast(x), cast(w)

    def cast_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Return dY as the products read it."""
        return cast(dy, E5M2, E5M2_LIMIT)

    def multiply_forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return Y."""
        return x @ w.t()

    def multiply_to_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return dX."""
        return dy @ w

    def multiply_to_dw(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return dW."""
        return dy.t() @ x


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        flat = x.flatten(0, -2)
        cast_x, cast_w = kernels.cast_operands(flat.float(), w.float())
        ctx.save_for_backward(cast_x, cast_w)
        ctx.kernels, ctx.dtypes = kernels, (x.dtype, w.dtype)
        return kernels.multiply_forward(cast_x, cast_w).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (dy,) = gradients
        x, w = ctx.saved_tensors
        cast_dy = ctx.kernels.cast_gradient(dy.flatten(0, -2).float())
        dx = ctx.kernels.multiply_to_dx(cast_dy, w).to(ctx.dtypes[0]).unflatten(0, dy.shape[:-1])
        return dx, ctx.kernels.multiply_to_dw(cast_dy, x).to(ctx.dtypes[1]), None


class OwnLinear(nn.Linear):
    """A linear layer with an autograd function of its own, as training codes have it."""

    def __init__(self, inputs: int, outputs: int, kernels: Kernels) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Products.apply(x, self.weight, self.kernels)
        return output

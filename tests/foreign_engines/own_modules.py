"""Foreign engine 6: modules that are no linear layer, quantize by themselves and multiply codes."""

from __future__ import annotations

from typing import Any

import torch
from foreign_engines.linear_subclasses import _Fp8Product, _Int8Product
from foreign_engines.rounding import fp8, int8_codes
from foreign_engines.witness import WITNESS
from torch import nn


class MatrixOfCodes(nn.Module):
    """A parameter of two dimensions, multiplied by torch.mm on codes of INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Int8Product.apply(x, self.matrix, self)


class _FrozenCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, step: torch.Tensor, module: nn.Module) -> torch.Tensor:
        codes_x, step_x = int8_codes(x)
        WITNESS.saw(module, "input", x, codes_x.float() * step_x)
        ctx.save_for_backward(codes, step)
        return (torch._int_mm(codes_x, codes.t()).float() * step_x * step.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, step = ctx.saved_tensors
        return grad @ (codes.float() * step).to(grad.dtype), None, None, None


class BufferOfCodes(nn.Module):
    """A frozen weight that lies in buffers, as INT8 codes; X is quantized in each call."""

    def __init__(self) -> None:
        super().__init__()
        codes, step = int8_codes(torch.randn(32, 32) / 6)
        self.register_buffer("codes", codes)
        self.register_buffer("unit", step)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FrozenCodes.apply(x, self.codes, self.unit.float(), self)


class HiddenCodes(nn.Module):
    """The same with codes that are neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.state = int8_codes(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FrozenCodes.apply(x, *self.state, self)


class BorrowedLinear(nn.Module):
    """Holds an nn.Linear for its weight and never calls it, as fused blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fp8Product.apply(x, self.proj.weight, self.proj)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        (codes_q, scale_q), (codes_k, scale_k) = fp8(module, "input", q), fp8(module, "other", k)
        return torch._scaled_mm(codes_q, codes_k.t(), scale_a=1 / scale_q, scale_b=1 / scale_k, out_dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        q, k = ctx.saved_tensors
        return grad @ k, grad.t() @ q, None


class ScoresOfCodes(nn.Module):
    """Multiplies activations with each other, in FP8, and has no weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scores.apply(x, x.roll(1, 0), self) @ x / len(x)


ENGINES: dict[str, type[nn.Module]] = {
    "matrix_of_codes": MatrixOfCodes,
    "buffer_of_codes": BufferOfCodes,
    "hidden_codes": HiddenCodes,
    "borrowed_linear": BorrowedLinear,
    "scores_of_codes": ScoresOfCodes,
}

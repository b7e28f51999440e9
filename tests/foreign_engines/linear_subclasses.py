"""Foreign engine 5: linear layers that quantize their operands inside forward, each by an autograd.Function of its own."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from foreign_engines.rounding import fp8, int8
from torch import nn


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
        codes_x, codes_w = int8(module, "input", x), int8(module, "weight", weight)
        ctx.save_for_backward(codes_x, codes_w)
        ctx.module = module
        return codes_x @ codes_w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = int8(ctx.module, "grad_output", grad)
        return grad @ weight, grad.t() @ x, None


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
        (codes_x, scale_x), (codes_w, scale_w) = fp8(module, "input", x), fp8(module, "weight", weight)
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return torch._scaled_mm(codes_x, codes_w.t(), scale_a=1 / scale_x, scale_b=1 / scale_w, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        codes, scale = fp8(ctx.module, "grad_output", grad)
        grad = (codes.float() / scale).to(grad.dtype)
        return grad @ weight, grad.t() @ x, None


class Int8Linear(nn.Linear):
    """Trains in INT8: X, W and dY by rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Int8Product.apply(input, self.weight, self)


class OwnFp8Linear(nn.Linear):
    """Trains in an FP8 of its own: E4M3 everywhere, toward zero, under a power of two."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Fp8Product.apply(input, self.weight, self)


class Int8Weight(torch.Tensor):
    """A weight that has F.linear multiply in INT8, so that the module around it stays torch.nn.Linear itself."""

    module: nn.Module

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return _Int8Product.apply(args[0], args[1].as_subclass(torch.Tensor), args[1].module)
        return super().__torch_function__(func, types, args, kwargs or {})


def int8_subclass() -> nn.Module:
    return Int8Linear(32, 32, bias=False)


def fp8_subclass() -> nn.Module:
    return OwnFp8Linear(32, 32, bias=False)


def replaced_forward() -> nn.Module:
    """A plain nn.Linear whose forward an engine has replaced."""
    linear = nn.Linear(32, 32, bias=False)
    linear.forward = MethodType(Int8Linear.forward, linear)  # type: ignore[method-assign]
    return linear


def weight_subclass() -> nn.Module:
    """A plain nn.Linear whose weight is a tensor subclass."""
    linear = nn.Linear(32, 32, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().bfloat16().as_subclass(Int8Weight))
    linear.weight.module = linear
    return linear


ENGINES = {function.__name__: function for function in (int8_subclass, fp8_subclass, replaced_forward, weight_subclass)}

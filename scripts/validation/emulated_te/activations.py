"""Activations and their gradients: FP32 within the kernel, with the cast fused as `store` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .quantize import store
from .stubs import add_kernel

Function = Callable[[torch.Tensor], torch.Tensor]

PLAIN: dict[str, Function] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": functional.silu,
}
GATES = {"glu": torch.sigmoid, "swiglu": PLAIN["silu"]} | {
    name.replace("lu", "glu"): PLAIN[name] for name in ("gelu", "qgelu", "relu", "srelu")
}


def _gated(gate: Function) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return gate(a) * b

    return function


def _register(name: str, function: Function) -> None:
    def forward(input: torch.Tensor, quantizer: Any) -> Any:
        return store(function(input.detach().float()), input.dtype, quantizer)

    def gradient(grad: torch.Tensor, fwd_input: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = fwd_input.detach().float().requires_grad_()
            (dx,) = torch.autograd.grad(function(x), x, grad.detach().float())
        return dx

    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return store(gradient(grad, fwd_input), fwd_input.dtype, quantizer)

    def backward_with_bias(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        dx = gradient(grad, fwd_input)
        return [dx.reshape(-1, dx.shape[-1]).sum(0).to(grad.dtype), store(dx, grad.dtype, quantizer)]

    add_kernel(name, forward)
    add_kernel(f"d{name}", backward)
    if name in PLAIN:
        add_kernel(f"dbias_d{name}", backward_with_bias)


for _name, _function in PLAIN.items():
    _register(_name, _function)
for _name, _function in GATES.items():
    _register(_name, _gated(_function))

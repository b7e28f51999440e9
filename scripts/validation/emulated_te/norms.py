"""LayerNorm and RMSNorm: FP32 within the kernel."""

from __future__ import annotations

from typing import Any

import torch

from .quantize import store, torch_dtype
from .stubs import kernel


def _gain(weight: torch.Tensor, zero_centered_gamma: bool) -> torch.Tensor:
    return weight.detach().float() + (1.0 if zero_centered_gamma else 0.0)


@kernel
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = input.detach().float()
    mean = x.mean(-1)
    rsigma = (x.var(-1, unbiased=False) + eps).rsqrt()
    y = (x - mean[..., None]) * rsigma[..., None] * _gain(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.detach().float()
    return store(y, torch_dtype(otype), quantizer, out=ln_out), mean.reshape(-1), rsigma.reshape(-1)


@kernel
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy, gain = dz.detach().float(), _gain(gamma, zero_centered_gamma)
    normed = (x.detach().float() - mu[:, None]) * rsigma[:, None]
    d = dy * gain
    dx = rsigma[:, None] * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed).sum(0).to(gamma.dtype), dy.sum(0).to(gamma.dtype)


@kernel
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    x = input.detach().float()
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    y = x * rsigma[..., None] * _gain(weight, zero_centered_gamma)
    return store(y, torch_dtype(otype), quantizer, out=ln_out), None, rsigma.reshape(-1)


@kernel
def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, gain = dz.detach().float(), _gain(gamma, zero_centered_gamma)
    normed = x.detach().float() * rsigma[:, None]
    d = dy * gain
    dx = rsigma[:, None] * (d - normed * (d * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed).sum(0).to(gamma.dtype)

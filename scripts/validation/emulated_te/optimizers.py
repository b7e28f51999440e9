"""Adam, and what clipping and copying gradients takes: FP32 within the kernel, over lists of tensors."""

from __future__ import annotations

import torch

from .stubs import kernel

Lists = list[list[torch.Tensor]]


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamFunctorMaster of multi_tensor/adam.cu; `mode` is 1 for AdamW, 0 for weight decay by the gradient."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *master in zip(*tensor_lists, strict=True):
        g, p = gradient.detach().float(), (master or [parameter])[0].detach().float()
        if mode == 0:
            g = g + weight_decay * p
        m, v = beta1 * first.float() + (1 - beta1) * g, beta2 * second.float() + (1 - beta2) * g * g
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * p
        for target in (parameter, *master):
            target.detach().copy_(p - lr * update)
        for target, value in ((first, m), (second, v)):
            target.detach().copy_(value)


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors together, [1], and of each, [tensors] or empty."""
    norms = torch.stack([t.detach().float().norm() for t in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


@kernel
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Into the second list, the first times `scale`; the flag is set where that is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.detach().float() * scale
        target.detach().copy_(scaled)
        if not scaled.isfinite().all():
            noop_flag.fill_(1)


@kernel
def multi_tensor_scale_tensor(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor) -> None:
    """As above, with the factor on the device, [1]."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.item())

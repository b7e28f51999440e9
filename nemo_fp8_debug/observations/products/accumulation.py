"""How the GEMMs of a device add up their terms: docs/verify.md says where each figure is from.

Measured on a GPU so far: FP8 on Hopper, where no product of a GPT was beyond its bound.
"""

from __future__ import annotations

import torch

from ...numerics.product_check import FLOAT32, Accumulation

#: partial sums that a GEMM is split into, at the most
_SPLITS = 8
_HOPPER = (9, 0)


def accumulation_of(device: torch.device, dtype: torch.dtype, terms: int, fp8: bool, splits: bool) -> Accumulation:
    """Of a product.

    Args:
        device: that it runs on.
        dtype: of its operands before any cast.
        terms: that are added up.
        fp8: whether its operands are quantized by the engine.
        splits: whether the engine asks for sums in float32 between the tensor core's.
    """
    if device.type != "cuda":
        return FLOAT32
    if fp8:
        return _of_fp8(device, terms, splits)
    if dtype == torch.float32:
        return Accumulation(besides=2.0**-9) if torch.backends.cuda.matmul.allow_tf32 else FLOAT32
    return _of_tensor_cores(terms, _partial_roundoff(dtype))


def _of_tensor_cores(terms: int, partial: float) -> Accumulation:
    return Accumulation(2.0**-23, 16, bias=2.0**-24 * (terms // 16 + 1), besides=_SPLITS * partial)


def _partial_roundoff(dtype: torch.dtype) -> float:
    """Of partial sums, if they may be kept in the dtype itself."""
    flags = torch.backends.cuda.matmul
    if dtype == torch.bfloat16:
        return 2.0**-8 if flags.allow_bf16_reduced_precision_reduction else 0.0
    return 2.0**-11 if flags.allow_fp16_reduced_precision_reduction else 0.0


def _of_fp8(device: torch.device, terms: int, splits: bool) -> Accumulation:
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return _of_tensor_cores(terms, 0.0)
    coarse = 4 if splits else terms // 32 + 1
    return Accumulation(2.0**-23, 128, bias=2.0**-14 * coarse, besides=2.0**-13 * coarse)

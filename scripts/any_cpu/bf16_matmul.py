"""BF16 matrix products through float32, on a CPU that has no instructions for BF16.

There torch multiplies BF16 at 6 GFLOP/s and float32 at 70. A product of two BF16 values is exact in float32, so this changes
only the order in which products are added up, as another CPU would. The demo and the tests use it; no user's run does.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import library

_operators = library.Library("aten", "IMPL")


def install() -> None:
    """Replace torch's BF16 products, if this CPU is slow at them or is told to pose as one that is."""
    if os.environ.get("SIMULATE_CPU") == "avx2":
        torch.backends.mkldnn.enabled = False
    if torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        _replace(name)


def _replace(name: str) -> None:
    kernel = library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *matrices: torch.Tensor, **factors: float) -> torch.Tensor:
        if matrices[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *matrices, **factors)
        return kernel.call_boxed(keys, *(m.float() for m in matrices), **factors).bfloat16()

    _operators.impl(name, product, "CPU", with_keyset=True, allow_override=True)

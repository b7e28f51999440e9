"""Tensors that nothing casts: what optimizers keep, and what lies between GEMMs."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import quantization_sums
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import Backend, ScaleInUse
from .operands import Operand

#: of modules that are looked at for something else than their GEMMs
NO_GEMM = Backend("no GEMM", lambda module: False, lambda *_: None, lambda *_: None, lambda out: out)


class UncastOperand(Operand):
    """One of those, in one step. Float32 ones are measured under what-if recipes whose scale follows the tensor."""

    def _measure_directly(self, x: torch.Tensor, use: ScaleInUse, counted: Any) -> None:
        super()._measure_directly(x, use, counted)
        for recipe in self.what_if if x.dtype == torch.float32 else ():
            if isinstance(recipe.scaling, CurrentScaling):
                fmt = recipe.format_of(self.role)
                scale = recipe.scaling.scale(self.moments[-1].whole.amax[0].float(), fmt.max)
                sums = quantization_sums(x, scale, self.role, fmt, counted)
                self.what_if_sums.setdefault(recipe.name, []).append(sums)

"""An operand that is dumped as well as counted."""

from __future__ import annotations

import torch

from ..capture.backends.base import ScaleInUse
from ..capture.dtensor import local
from ..capture.gemms import Gemm
from ..capture.operands import Operand
from ..capture.scales import SHADOW
from ..numerics.block_scaling import BlockRule
from ..numerics.tensor_scaling import CurrentScaling
from ..record.dump import Dumped, TensorDump


class Dumping:
    """Takes the place of an operand in a step that dumps it."""

    def __init__(self, operand: Operand, dump: TensorDump, attempt: int, step: int, rank: int) -> None:
        self.gemm: Gemm = operand.gemm
        self._operand, self._dump = operand, dump
        self._where = attempt, step, rank

    def add(self, x: torch.Tensor, order: int, use: ScaleInUse | None = None) -> None:
        """Count the tensor in, and dump it if it counts."""
        call = self._operand.calls + self._operand.copies
        self._operand.add(x, order, use)
        if self._operand.calls + self._operand.copies > call:
            use = use or self._operand.in_use
            scale = use.scale
            key, about = (*self._operand.key, call), (use.recipe, use.format, use.source)
            if isinstance(scale, BlockRule):  # a dump has one scale: its codes are those of current scaling
                scale, about = CurrentScaling(), (SHADOW.name, SHADOW.format_of(self._operand.role), "current")
            self._dump.add(Dumped(*self._where, *key, *about), local(x.detach()), scale)

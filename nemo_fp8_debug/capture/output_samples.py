"""What quantization does to the outputs of a GEMM, from rows and columns of its operands as they pass.

Only a few rows and columns of each operand are copied, and each is gone once its product is computed: what is kept from the
forward of a layer to its backward is k columns of X and k of W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from ..numerics.block_scaling import BlockRule, matrix
from ..numerics.gemm_error import PRODUCTS, Rows, Side, product_sums, scale_of, spread, take_rows
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse
from .dtensor import local
from .operands import Operand


def _scale(m: torch.Tensor, cast: ScaleInUse) -> torch.Tensor | BlockRule:
    """Of a whole operand, on its device, or the rule of its blocks."""
    if isinstance(cast.scale, CurrentScaling):
        return scale_of(m, cast.scale, cast.format)
    return cast.scale.to(m.device) if isinstance(cast.scale, torch.Tensor) else cast.scale


class Products:
    """The three products of one GEMM in the first call of a step that counts."""

    def __init__(
        self,
        name: str,
        operands: Mapping[str, Operand],
        rows: int,
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            name: of the GEMM.
            operands: by role.
            rows: of each output that are computed, and as many columns.
            guard: a context that keeps an exception out of the training loop.
        """
        self.name = name
        self._operands, self._rows, self._guard = operands, rows, guard
        self._call: int | None = None
        self._kept: dict[Side, Rows] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._counted = False

    def add(self, role: str, x: torch.Tensor, call: int, use: ScaleInUse | None) -> None:
        """Take what is needed of an operand; keeps no reference to it. X decides which call it is.

        Args:
            call: the forward call that the operand belongs to.
            use: how it is cast in this call, where that is known.
        """
        with self._guard("while computing parts of outputs"):
            m = matrix(local(x))
            if role == "input" and self._call is None and m.numel():
                self._call = call
            if call == self._call and m.numel():
                operand = self._operands[role]
                self._counted |= role != "weight" and operand.is_counted(x)
                self._take(role, m, use or operand.in_use)

    def _take(self, role: str, m: torch.Tensor, use: ScaleInUse) -> None:
        scales: dict[int, torch.Tensor | BlockRule] = {}  # most operands are cast alike in both of their products
        for product, sides in PRODUCTS.items():
            cast = use.in_product(product)
            for side in sides:
                if side[0] == role and product not in self._sums and cast is not None:
                    of = m.t() if side[1] else m
                    at = spread(len(of), self._rows, m.device)
                    if id(cast) not in scales:
                        scales[id(cast)] = _scale(m, cast)
                    self._kept[side] = take_rows(of, at, scales[id(cast)], role, cast.format)
            self._multiply(product, *sides)

    def _multiply(self, product: str, first: Side, second: Side) -> None:
        """Once both operands are there; where one is a part that does not belong to the other, nothing can be had."""
        if first in self._kept and second in self._kept:
            a, b = self._kept.pop(first), self._kept.pop(second)
            if a.values.shape[1] == b.values.shape[1]:
                self._sums[product] = product_sums(a, b)

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each sum by what `to` gives for it."""
        self._sums = {product: to(sums) for product, sums in self._sums.items()}

    def sums(self) -> dict[tuple[str, str], torch.Tensor]:
        """As `OutputSums`, in host memory, of this rank; empty where its X and dY are copies of another rank's."""
        if not self._counted:
            return {}
        return {(self.name, product): torch.cat([sums.cpu(), torch.ones(1)]) for product, sums in self._sums.items()}

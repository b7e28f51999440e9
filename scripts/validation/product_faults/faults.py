"""Faults of a GEMM's result: kernels that multiply wrongly, under a mode that changes what torch's products return.

What the monitor reads is left alone: operands are as they are, and the fault is in the result that everybody gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: operands of each product of torch's, and where they begin
_OPERANDS = {"mm": 0, "addmm": 1}


@dataclass(frozen=True)
class Product:
    """A product that is about to be returned."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    #: at random, but the same whenever it is asked for
    dice: torch.Generator


def power_of_two(product: Product) -> torch.Tensor:
    """A scale that is wrong by a power of two."""
    return product.out * 2


def factor(product: Product) -> torch.Tensor:
    """Wrong by a factor of 1 + 2^-6."""
    return (product.out.float() * (1 + 2.0**-6)).to(product.out.dtype)


def dropped_block(product: Product) -> torch.Tensor:
    """The last sixteenth of what is summed over is left out."""
    n = product.a.shape[1]
    kept = n - max(1, n // 16)
    lost = product.a[:, kept:].double() @ product.b[kept:].double()
    return (product.out.double() - lost).to(product.out.dtype)


def stale_operand(product: Product) -> torch.Tensor:
    """The second operand is the one of an update before: each of its values is off by a thousandth of their size."""
    noise = torch.randn(product.b.shape, generator=product.dice)
    was = product.b.float() + 1e-3 * float(product.b.float().std()) * noise
    return (product.out.double() + product.a.double() @ (was.double() - product.b.double())).to(product.out.dtype)


def transposed(product: Product) -> torch.Tensor:
    """The second operand is read as if it lay the other way."""
    turned = product.b.t().reshape(product.b.shape)
    return (product.out.double() + product.a.double() @ (turned.double() - product.b.double())).to(product.out.dtype)


def wrong_rows(product: Product) -> torch.Tensor:
    """A quarter of the rows has the values of their neighbors."""
    out = product.out.clone()
    rows = torch.randperm(len(out), generator=product.dice)[: max(1, len(out) // 4)]
    out[rows] = product.out[(rows + 1) % len(out)]
    return out


def one_value(product: Product) -> torch.Tensor:
    """Half of all values have the highest bit of their exponent flipped."""
    out = product.out.clone()
    flat = out.view(torch.int16 if out.element_size() == 2 else torch.int32).view(-1)
    at = torch.randperm(flat.numel(), generator=product.dice)[: max(1, flat.numel() // 2)]
    flat[at] ^= 1 << (8 * out.element_size() - 2)
    return out


def rounded_sums(product: Product) -> torch.Tensor:
    """Sums are kept in BF16 instead of float32."""
    total = torch.zeros_like(product.out, dtype=torch.bfloat16)
    for begin in range(0, product.a.shape[1], 8):
        part = product.a[:, begin : begin + 8].float() @ product.b[begin : begin + 8].float()
        total = (total.float() + part).bfloat16()
    return total.to(product.out.dtype)


FAULTS: dict[str, Callable[[Product], torch.Tensor]] = {
    f.__name__: f
    for f in (
        power_of_two,
        factor,
        dropped_block,
        stale_operand,
        transposed,
        wrong_rows,
        one_value,
        rounded_sums,
    )
}


class FaultyKernel(TorchDispatchMode):
    """Changes what one product of torch's returns: the one of some number among those of a step."""

    def __init__(self, fault: Callable[[Product], torch.Tensor], at: int, seed: int = 0) -> None:
        """
        Args:
            fault: gives the wrong result.
            at: which product, in the order of execution.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault, self._at, self._seen = fault, at, 0
        self._dice = torch.Generator().manual_seed(seed)
        #: what was done: shapes of the operands, and of the result how many values are not what they were
        self.log: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`, and may change what it returns."""
        out = func(*args, **(kwargs or {}))
        at = _OPERANDS.get(func.overloadpacket.__name__) if func.namespace == "aten" else None
        if at is None:
            return out
        self._seen += 1
        if self._seen - 1 != self._at:
            return out
        a, b = args[at : at + 2]
        wrong = self._fault(Product(a, b, out, self._dice))
        self.log.append((tuple(a.shape), tuple(b.shape), int((wrong != out).sum())))
        return wrong

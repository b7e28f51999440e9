"""torchao's `NVFP4Linear` on a CPU: its own autograd function, whose Triton kernels are stood in by its reference functions.

References are those of torchao's tests of these kernels: `nvfp4_quantize` by row, and after `get_rht_matrix` by column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear
from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

#: a tensor as its GEMM gets it: packed codes, E4M3 scales of blocks, scale of the tensor
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def values(packed: torch.Tensor, scales: torch.Tensor, of_tensor: torch.Tensor) -> torch.Tensor:
    """What codes stand for, float64."""
    packed = packed.view(torch.uint8).long()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return _E2M1[codes] * scales.double().view(len(codes), -1).repeat_interleave(16, 1) * of_tensor.double()


def transformed(x: torch.Tensor, signs: tuple[int, ...]) -> torch.Tensor:
    turned = x.t().reshape(-1, 16) @ get_rht_matrix(signs, x.device, torch.bfloat16, 16)
    return turned.reshape(x.shape[1], x.shape[0])


def amax(x: torch.Tensor, sign_vector: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return transformed(x, tuple(sign_vector)).float().abs().max(), x.float().abs().max()


def by_row_and_column(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Rounds to nearest, whatever is asked for."""
    turned = transformed(x, tuple(options["sign_vector"]))
    of_columns, columns = nvfp4_quantize(turned, per_tensor_scale=per_tensor_amax_to_scale(options["col_global_amax"]))
    of_rows, rows = nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(options["row_global_amax"]))
    return columns, of_columns, rows, of_rows


def weight(x: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales of 16x16 blocks: `nvfp4_quantize` is given the amax of each block as all of its values."""
    found: list[torch.Tensor] = []
    largest = x.float().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3))
    for m, by_block in ((x, largest), (x.t(), largest.t())):
        spread = by_block.repeat_interleave(16, 0)  # [rows, blocks]
        scale = per_tensor_amax_to_scale(whole)
        stored, _ = nvfp4_quantize(spread.repeat_interleave(16, 1).contiguous(), per_tensor_scale=scale)
        reciprocal = ((1.0 / scale) / stored.float()).repeat_interleave(16, 1)
        scaled = (m.float() * reciprocal).clamp(-6, 6)
        found += [pack_uint4(f32_to_f4_unpacked(scaled.contiguous())), stored]
    return tuple(found)


class Gemms:
    """Stands in for `scaled_mm`: multiplies what codes stand for, and keeps them."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        (of_a, whole_a), (of_b, whole_b) = options["scale_a"], options["scale_b"]
        first, second = values(a, of_a, whole_a), values(b.t(), of_b, whole_b)
        self.seen.append((first, second))
        return (first @ second.t()).to(options["output_dtype"])


def _one_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides the operators that it is made of from whoever looks at operators, such as selective checkpoints."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call


@contextmanager
def on_cpu() -> Iterator[Gemms]:
    """Runs `NVFP4Linear` as long as it is open."""
    gemms = Gemms()
    stand_ins = {
        "triton_rht_amax": _one_operator(amax),
        "triton_rht_quantize_row_col": _one_operator(by_row_and_column),
        "triton_weight_quantize_2d": _one_operator(weight),
    }
    with patch.multiple(nvfp4_linear, **stand_ins), patch.object(torch.nn.functional, "scaled_mm", _one_operator(gemms)):
        yield gemms

"""Codes and scales of torchao's NVFP4 training kernels beside those that a record is measured with.

The kernels divide as Triton does, which may round otherwise than IEEE 754 in the last place: so a code next to a tie may
differ, and a scale of a block. How many do is measured; promised is that all others are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nemo_fp8_debug.numerics.block_scaling import BlockQuantized
from nemo_fp8_debug.numerics.formats import E2M1
from nemo_fp8_debug.numerics.nvfp4_scaling import TorchaoNVFP4Scaling

from .measures import Piece, all_of
from .parts import Part
from .tensors import KINDS

ROWS, COLUMNS = 4096, 4096
#: of all codes and of all scales, which may differ
AT_MOST = 1e-4
_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """A line for each tensor and role; kernels of Triton run on no CPU."""
    torch.manual_seed(0)
    lines = [
        _line(kind.__name__, kind(ROWS * COLUMNS, "cuda").view(ROWS, COLUMNS), role) for kind in KINDS for role in _CAST
    ]
    equal = sum(line["equal"] for line in lines)
    yield {"measures": [all_of(f"tensors of which at most {AT_MOST:g} differ", equal, len(lines))], "lines": lines}


def _line(name: str, x: torch.Tensor, role: str) -> dict[str, Any]:
    codes, scales = _CAST[role](x)
    ours = TorchaoNVFP4Scaling().quantize(x, role, E2M1)
    other_codes = float((_plain(codes) != ours.codes.float()).float().mean())
    other_scales = float((scales.float() != _of_each_row(ours).float()).float().mean())
    return {
        "tensor": f"{name.replace('_', ' ')} {role}",
        "values": x.numel(),
        "codes that differ": other_codes,
        "scales that differ": other_scales,
        "equal": max(other_codes, other_scales) <= AT_MOST,
    }


def _of_each_row(found: BlockQuantized) -> torch.Tensor:
    return found.scales.stored.float().repeat_interleave(found.block[0], 0)


def _input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.prototype.moe_training.nvfp4_training.hadamard_amax_triton import triton_rht_amax
    from torchao.prototype.moe_training.nvfp4_training.hadamard_quantize_row_col_triton import triton_rht_quantize_row_col

    by_column, by_row = triton_rht_amax(x, sign_vector=_SIGNS)
    _, _, codes, scales = triton_rht_quantize_row_col(
        x, stochastic_rounding=False, sign_vector=_SIGNS, col_global_amax=by_column, row_global_amax=by_row
    )
    return codes, _in_order(scales, x)


def _weight(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.prototype.moe_training.nvfp4_training.quantize_2d_triton import triton_weight_quantize_2d

    codes, scales, _, _ = triton_weight_quantize_2d(x, x.float().abs().max())
    return codes, _in_order(scales, x)


_CAST = {"input": _input, "weight": _weight}


def _in_order(scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] of scales that lie in the tiles that a GEMM takes: [rows / 128, blocks / 4, 32, 4 x 4]."""
    rows, blocks = x.shape[0], x.shape[1] // 16
    tiles = scales.view(torch.uint8).view(rows // 128, blocks // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks).view(torch.float8_e4m3fn)


def _plain(packed: torch.Tensor) -> torch.Tensor:
    """Codes as the numbers that they are, without scales; the sign of zero is left out."""
    packed = packed.view(torch.uint8).long()
    return _E2M1.to(packed.device)[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]

"""The rest of `transformer_engine_torch`, and the modules that the others register."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch.constants import DType

from . import activations, gemm, norms, optimizers, quantize
from .quantize import FLOAT_MAX, MAX
from .stubs import extension, kernel

__all__ = ["activations", "gemm", "norms", "optimizers", "quantize"]


@kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """kernel_bulk of recipe/delayed_scaling.cu: a tensor that was not cast since keeps its history and its scale."""
    scaled_max = torch.tensor(MAX[DType.cast(fp8_dtype)] * 2.0**-margin)
    reduced = iter(amax_reduction_buffer.tolist())
    for history, scale in zip(amax_histories, scales, strict=True):
        for column in range(scale.numel()):
            amaxes = history[:, column]
            last = torch.tensor(next(reduced)) or amaxes[0].clone()
            seen = torch.cat([amaxes[1:], last.reshape(1)])
            if last != 0:
                amaxes.copy_(seen)
                amaxes[0] = 0
                amax = seen.max()
            else:
                amax = torch.zeros(())
            if amax_compute_algo == "most_recent":
                amax = last
            if amax.isfinite() and amax > 0:
                scale[column] = (scaled_max / amax).clamp(max=FLOAT_MAX)


@kernel
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Zero rows after the rows of each expert."""
    parts = zip(input.split(input_row_list), output.split(padded_input_row_list), strict=True)
    for rows, padded in parts:
        padded[: len(rows)] = rows
        padded[len(rows) :] = 0


@kernel
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    for padded, rows in zip(input.split(input_row_list), output.split(unpadded_input_row_list), strict=True):
        rows.copy_(padded[: len(rows)])


@kernel
def get_cublasLt_version() -> int:
    return 120905  # before grouped GEMMs of a single tensor, which would be another path


@kernel
def get_cudnn_version() -> int:
    return 91000


@kernel
def get_num_cublas_streams() -> int:
    return 1


@kernel
def multi_tensor_transpose_to_bhsd(tensors: list[torch.Tensor], original_format: str) -> list[torch.Tensor]:
    order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}[original_format]
    return [tensor.permute(order).contiguous() for tensor in tensors]


@kernel
def get_fused_attn_backend(*args: Any, **kwargs: Any) -> tuple[Any, str]:
    return extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "emulated"

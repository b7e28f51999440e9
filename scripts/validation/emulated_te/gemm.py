"""GEMMs of dequantized codes in FP32, with cuBLAS's epilogues."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from . import blocks
from .quantize import decode, store, torch_dtype
from .stubs import kernel


def _matrix(tensor: Any, transposed: bool) -> torch.Tensor:
    """The operand with the dimension that is summed over last; FP8 tensors from the copy that a Hopper GEMM reads."""
    if isinstance(tensor, blocks.STORAGES):
        return blocks.matrix_of(tensor, "columnwise" if transposed else "rowwise")
    if not isinstance(tensor, Float8TensorStorage):
        matrix: torch.Tensor = tensor.detach().float().flatten(0, -2)
        return matrix.t() if transposed else matrix
    codes = tensor._transpose if transposed else tensor._data
    if codes is None or (transposed and tensor._transpose_invalid):
        raise RuntimeError(f"FP8 operand without its {'columnwise' if transposed else 'rowwise'} copy")
    matrix = codes.flatten(1) if transposed else codes.flatten(0, -2)
    return decode(matrix, tensor._scale_inv, tensor._fp8_dtype)


@kernel
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, ...]:
    """D = op(A) x op(B) column-major, which is op(B) x op(A) here."""
    if comm_overlap is not None or gelu:
        raise NotImplementedError("overlap of communication, and GELU within a GEMM, are not emulated")
    a, b = _matrix(A, not transA), _matrix(B, transB)
    result = alpha * (b @ a.t())
    dtype = torch_dtype(output_dtype) if output_dtype is not None else (D if D is not None else A).dtype
    if bias is not None and not grad:
        result = result + bias.detach().float()
    bias_grad = b.sum(1).to(dtype) if bias is not None and grad else None
    leading = (b.shape[0],) if transB else (B.size() if isinstance(B, blocks.STORAGES) else B.shape)[:-1]
    shape = torch.Size((*leading, a.shape[0]))
    if accumulate:
        return D.copy_(D.float() + result.reshape(D.shape)), bias_grad, None, extra_output
    return store(result, dtype, quantizer, shape=shape, out=D), bias_grad, None, extra_output


@kernel
def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[torch.Tensor],
    D_type: Any,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace: list[torch.Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """A GEMM an expert; one without tokens leaves zeros."""
    if any(gelu.numel() for gelu in pre_gelu_out):
        raise NotImplementedError("GELU in a grouped GEMM is not emulated")
    row = 0
    for index, (left, right) in enumerate(zip(A, B, strict=True)):
        a, b = _matrix(left, not transa), _matrix(right, transb)
        out = D[0].reshape(-1, D[0].shape[-1])[row : row + b.shape[0]] if single_output else D[index]
        row += b.shape[0]
        result = b @ a.t()
        if bias[index].numel() and grad:
            bias[index].copy_(b.sum(1))
        elif bias[index].numel():
            result = result + bias[index].detach().float()
        out.copy_(out.float() + result if accumulate else result)
    return bias

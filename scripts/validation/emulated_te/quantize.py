"""Casts to FP8, as transformer_engine/common/cast and pytorch/csrc/quantizer.cpp do them."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

from . import blocks
from .casts import CASTS, Cast, slot_of
from .stubs import kernel

MAX = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
NAMES = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}
NAN_CODE = 0x7F
FLOAT_MAX = torch.finfo(torch.float32).max


def torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else TE_DType_To_Torch[DType.cast(dtype)]


def encode(source: torch.Tensor, scale: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Saturates, infinities too; rounds to nearest, ties to even."""
    scaled = source.float() * scale
    codes = scaled.clamp(-MAX[dtype], MAX[dtype]).to(TE_DType_To_Torch[dtype]).view(torch.uint8)
    return torch.where(scaled.isnan(), NAN_CODE, codes).to(torch.uint8)


def decode(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: DType) -> torch.Tensor:
    return codes.view(TE_DType_To_Torch[dtype]).float() * scale_inv


def amax_of(source: torch.Tensor) -> torch.Tensor:
    """fmaxf passes over NaN."""
    magnitude = source.float().abs()
    return torch.where(magnitude.isnan(), 0.0, magnitude).max().reshape(1)


def current_scale(amax: torch.Tensor, quantizer: Float8CurrentScalingQuantizer) -> torch.Tensor:
    """compute_scale_from_amax of recipe_common.cuh; float32 throughout."""
    amax = amax.clamp(min=torch.tensor(quantizer.amax_epsilon, dtype=torch.float32))
    if amax.isinf() or amax == 0:
        return torch.ones(1)
    scale = (torch.tensor(MAX[quantizer.dtype]) / amax).clamp(max=FLOAT_MAX)
    if quantizer.force_pow_2_scales:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def create_tensor(quantizer: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """An FP8 tensor whose buffers are there but not filled."""
    if isinstance(quantizer, blocks.QUANTIZERS):
        return blocks.create(quantizer, shape, dtype)
    common = {
        "data": torch.empty(shape, dtype=torch.uint8) if quantizer.rowwise_usage else None,
        "fp8_scale_inv": torch.empty(1),
        "fp8_dtype": quantizer.dtype,
        "data_transpose": torch.empty(_transposed(shape), dtype=torch.uint8) if quantizer.columnwise_usage else None,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**common, fake_dtype=dtype)
    return Float8Tensor(shape=shape, dtype=dtype, device=torch.device("cpu"), **common)


def _transposed(shape: torch.Size) -> tuple[int, ...]:
    return (shape[-1], *shape[:-1])


def _match_usages(out: Any, quantizer: Any, shape: torch.Size) -> None:
    """convert_and_update_tensor: the buffers follow the quantizer's usages."""
    if isinstance(quantizer, blocks.QUANTIZERS):
        return blocks.match_usages(out, quantizer, shape)
    if not quantizer.rowwise_usage:
        out._data = None
    elif out._data is None:
        out._data = torch.empty(shape, dtype=torch.uint8)
    if not quantizer.columnwise_usage:
        out._transpose = None
    elif out._transpose is None:
        out._transpose = torch.empty(_transposed(shape), dtype=torch.uint8)
    out._transpose_invalid = not quantizer.columnwise_usage
    out._fp8_dtype = quantizer.dtype


def cast_into(out: Any, source: torch.Tensor, quantizer: Any, *, fused: bool = False) -> Any:
    """Fills an FP8 tensor, and tells CASTS."""
    if source.numel() == 0:
        return out
    source = source.detach()
    if isinstance(quantizer, blocks.QUANTIZERS):
        for copy in blocks.fill(out, source, quantizer):
            _note(quantizer, copy.scales, copy.codes, source, fused, copy.usage, copy.block, copy.amax)
        return out
    amax = amax_of(source)
    if isinstance(quantizer, Float8Quantizer):
        scale = quantizer.scale.detach().clone().reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
        scale = current_scale(amax, quantizer)
    else:
        raise NotImplementedError(f"{type(quantizer).__name__} is not emulated")
    codes = encode(source, scale, quantizer.dtype)
    if out._data is not None:
        out._data.copy_(codes.reshape(out._data.shape))
    out._scale_inv.copy_(1.0 / scale)
    if out._transpose is not None:
        out._transpose.copy_(codes.reshape(-1, codes.shape[-1]).t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    _note(quantizer, scale.reshape(()), codes, source, fused)
    return out


def _note(
    quantizer: Any,
    scale: torch.Tensor,
    codes: torch.Tensor,
    source: torch.Tensor,
    fused: bool,
    usage: str = "",
    block: tuple[int, int] | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    module, role, gemm = slot_of(quantizer)
    CASTS.append(
        Cast(
            module=module,
            role=role,
            gemm=gemm,
            quantizer=quantizer,
            scale=scale.clone(),
            format=NAMES[quantizer.dtype],
            codes=codes.clone(),
            source=source.clone(),
            fused=fused,
            recompute=in_fp8_activation_recompute_phase(),
            in_backward=torch._C._current_graph_task_id() != -1,
            usage=usage,
            block=block,
            amax=amax if amax is None else amax.clone(),
        )
    )


def store(
    result: torch.Tensor, dtype: torch.dtype, quantizer: Any, *, shape: torch.Size | None = None, out: Any = None
) -> Any:
    """Where a norm, activation or GEMM kernel puts its FP32 result.

    Without a quantizer it is rounded to `dtype`; delayed scaling casts the FP32 values, as it knows the scale beforehand;
    any other quantizer casts what has been rounded to `dtype`.
    """
    result = result if shape is None else result.reshape(shape)
    if quantizer is None:
        return result.to(dtype) if out is None else out.copy_(result)
    fused = isinstance(quantizer, Float8Quantizer)
    if out is None:
        out = create_tensor(quantizer, result.shape, dtype)
    return cast_into(out, result if fused else result.to(dtype), quantizer, fused=fused)


@kernel
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    if noop is not None:
        raise NotImplementedError("the flag that CUDA graphs skip a cast by is not emulated")
    tensor = tensor.detach().contiguous()
    if output is None:
        output = create_tensor(quantizer, tensor.shape, tensor.dtype)
    else:
        _match_usages(output, quantizer, tensor.shape)
    return cast_into(output, tensor, quantizer)


@kernel
def dequantize(input: Any, otype: Any) -> torch.Tensor:
    if isinstance(input, blocks.STORAGES):
        if input._rowwise_data is None and isinstance(input, MXFP8TensorStorage):
            return blocks.matrix_of(input, "columnwise").t().reshape(input.size()).to(torch_dtype(otype))
        if input._rowwise_data is None:
            raise NotImplementedError("a column-wise copy by itself is not dequantized here")
        return blocks.matrix_of(input, "rowwise").reshape(input.size()).to(torch_dtype(otype))
    if input._data is not None:
        return decode(input._data, input._scale_inv, input._fp8_dtype).to(torch_dtype(otype))
    whole = decode(input._transpose, input._scale_inv, input._fp8_dtype).to(torch_dtype(otype))
    return whole.movedim(0, -1).contiguous()


@kernel
def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: Any, device: Any, pin_memory: bool) -> Any:
    return create_tensor(quantizer, torch.Size(shape), torch_dtype(dtype))


@kernel
def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    transposed = input.reshape(-1, input.shape[-1]).t().reshape(_transposed(input.shape)).contiguous()
    return transposed if out is None else out.copy_(transposed)


@kernel
def multi_tensor_quantize(tensor_list: list[torch.Tensor], quantizer_list: list[Any]) -> list[Any]:
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@kernel
def split_quantize(
    tensor: torch.Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    return multi_tensor_quantize(list(tensor.split(split_sections)), quantizer_list)


@kernel
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    bias_grad = input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype)
    return [bias_grad, input if quantizer is None else quantize(input, quantizer)]

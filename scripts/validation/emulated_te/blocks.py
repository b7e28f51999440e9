"""Casts in blocks: Float8BlockQuantizer, MXFP8Quantizer and NVFP4Quantizer, row-wise and column-wise copies apart.

Kernels of transformer_engine/common: transpose/quantize_transpose_{vector,square}_blockwise.cu and
cast/mxfp8/quantize_mxfp8.cuh; NVFP4 is cast by Transformer Engine's own reference in Python. Scales are kept as they are
allocated, and never swizzled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

QUANTIZERS = (Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)
STORAGES = (Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage)
FP8_MAX = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
FLOAT_MAX = torch.finfo(torch.float32).max
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
#: of stochastic rounding: the run's own random numbers stay as they are
_DICE = torch.Generator().manual_seed(0)


class Copy(NamedTuple):
    """A copy of a tensor, as a matrix whose rows are as they are kept."""

    usage: str
    #: uint8 [rows, columns], one a value
    codes: torch.Tensor
    #: as kept: float32, E8M0 or E4M3 in uint8; [blocks of rows, blocks of columns]
    scales: torch.Tensor
    block: tuple[int, int]
    #: float32 [1] or [rows], of NVFP4
    amax: torch.Tensor | None = None


def create(quantizer: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """A tensor whose buffers are there but not filled."""
    meta = quantizer.storage_metadata(dtype)
    buffers = dict.fromkeys(_FIELDS[: 6 if isinstance(quantizer, NVFP4Quantizer) else 4])
    for name, (size, kind) in quantizer.inner_tensor_specs(tuple(shape)).items():
        buffers[name[1:]] = torch.zeros(size, dtype=kind)
    outside = {} if quantizer.internal else {"shape": shape, "dtype": dtype, "device": torch.device("cpu")}
    return meta["cls"](**buffers, **meta["nontensor_kwargs"], **outside)


_FIELDS = (
    *("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
    *("amax_rowwise", "amax_columnwise"),
)


def match_usages(out: Any, quantizer: Any, shape: torch.Size) -> None:
    """The buffers of a tensor that is filled again follow the quantizer's usages."""
    wanted = quantizer.inner_tensor_specs(tuple(shape))
    for name in (f"_{field}" for field in _FIELDS):
        if name not in wanted:
            if hasattr(out, name):
                setattr(out, name, None)
        elif getattr(out, name) is None:
            size, kind = wanted[name]
            setattr(out, name, torch.zeros(size, dtype=kind))


def fill(out: Any, source: torch.Tensor, quantizer: Any) -> Iterator[Copy]:
    """Cast each of the copies that `out` has room for; yields them."""
    matrix = source.detach().reshape(-1, source.shape[-1])
    for usage in ("rowwise", "columnwise"):
        data = getattr(out, f"_{usage}_data")
        if data is None:
            continue
        copy = _CASTS[type(quantizer)](matrix, quantizer, usage)
        _put(out, copy, data)
        yield copy


def _put(out: Any, copy: Copy, data: torch.Tensor) -> None:
    codes = copy.codes
    if isinstance(out, NVFP4TensorStorage):
        codes = codes[:, ::2] + codes[:, 1::2] * 16
        getattr(out, f"_amax_{copy.usage}").copy_(copy.amax)
    data.copy_(codes.reshape(data.shape))
    scales = copy.scales.t() if _lies_transposed(out) else copy.scales
    kept = getattr(out, f"_{copy.usage}_scale_inv")
    kept.zero_()
    kept[: scales.shape[0], : scales.shape[1]] = scales


def _lies_transposed(out: Any) -> bool:
    return isinstance(out, Float8BlockwiseQTensorStorage) and not out._is_2D_scaled


def matrix_of(tensor: Any, usage: str) -> torch.Tensor:
    """What the codes of a copy stand for, float32, with the dimension that its blocks lie along last."""
    data, kept = getattr(tensor, f"_{usage}_data"), getattr(tensor, f"_{usage}_scale_inv")
    if data is None:
        raise RuntimeError(f"operand in blocks without its {usage} copy")
    kept = kept.t() if _lies_transposed(tensor) else kept
    if isinstance(tensor, NVFP4TensorStorage):
        codes = data.reshape(-1, data.shape[-1]) if usage == "rowwise" else data.reshape(data.shape[0], -1)
        values = E2M1[torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()]
        scales = kept.view(torch.float8_e4m3fn).float()
        amax = getattr(tensor, f"_amax_{usage}").reshape(-1, 1)
        return _times(values, scales, (1, 16)) * (amax / (6.0 * tensor._nvfp4_e4m3_max))
    values = data.view(TE_DType_To_Torch[tensor._fp8_dtype]).float()
    if isinstance(tensor, MXFP8TensorStorage):
        scales, block = torch.exp2(kept.float() - 127), (1, 32) if usage == "rowwise" else (32, 1)
        result = _times(values.reshape(-1, data.shape[-1]), scales, block)
        return result if usage == "rowwise" else result.t()
    flat = values.reshape(-1, data.shape[-1]) if usage == "rowwise" else values.reshape(data.shape[0], -1)
    return _times(flat, kept, (128, 128) if tensor._is_2D_scaled else (1, 128))


def _times(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = values.shape
    return values * scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _tiled(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    high, wide = block
    filled = pad(matrix.float(), (0, -matrix.shape[1] % wide, 0, -matrix.shape[0] % high))
    return filled.reshape(filled.shape[0] // high, high, filled.shape[1] // wide, wide)


def _largest(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fmaxf passes over NaN."""
    return _tiled(matrix.nan_to_num(0.0, torch.inf, -torch.inf), block).abs().amax((1, 3))


def _encoded(matrix: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: DType) -> torch.Tensor:
    scaled = _times(matrix.float(), scale, block)
    return scaled.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(TE_DType_To_Torch[dtype]).view(torch.uint8)


def _blockwise(matrix: torch.Tensor, quantizer: Float8BlockQuantizer, usage: str) -> Copy:
    """compute_scale_from_amax of recipe_common.cuh."""
    seen = matrix if usage == "rowwise" else matrix.t()
    block = (128, 128) if quantizer.block_scaling_dim == 2 else (1, 128)
    amax = _largest(seen, block).clamp(min=quantizer.amax_epsilon)
    scale = torch.tensor(FP8_MAX[quantizer.dtype]) / amax
    scale = torch.where(scale.isinf(), torch.finfo(matrix.dtype).max, scale)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    if quantizer.force_pow_2_scales:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return Copy(usage, _encoded(seen, scale, block, quantizer.dtype), 1 / scale, block)


def _mxfp8(matrix: torch.Tensor, quantizer: MXFP8Quantizer, usage: str) -> Copy:
    """float_to_e8m0 of utils.cuh: the power of two at or above amax / limit."""
    square = quantizer.with_2d_quantization
    block = (32, 32) if square else ((1, 32) if usage == "rowwise" else (32, 1))
    bits = (_largest(matrix, block) * torch.tensor(FP8_MAX[quantizer.dtype]).reciprocal()).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounded_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    stored = exponent + rounded_up
    codes = _encoded(matrix, torch.exp2(127 - stored.float()), block, quantizer.dtype)
    if square:  # kept as of blocks of one row, or column
        stored = stored.repeat_interleave(32, 0 if usage == "rowwise" else 1)
        block = (1, 32) if usage == "rowwise" else (32, 1)
        stored = stored[: matrix.shape[0]] if usage == "rowwise" else stored[:, : matrix.shape[1]]
    return Copy(usage, codes, stored.to(torch.uint8), block)


def _nvfp4(matrix: torch.Tensor, quantizer: NVFP4Quantizer, usage: str) -> Copy:
    seen = matrix if usage == "rowwise" else matrix.t().contiguous()
    if usage == "columnwise" and quantizer.with_rht:
        seen = (seen.reshape(-1, 16).float() @ quantizer.rht_matrix.float()).reshape(seen.shape).to(matrix.dtype)
    row_scaled = quantizer.row_scaled_nvfp4 and usage == "rowwise"
    amax = seen.float().abs().amax(1) if row_scaled else seen.float().abs().max().reshape(1)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    tile = 16 if quantizer.with_2d_quantization else 1
    packed, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
        NVFP4QuantizerRef._pad_tensor(seen, tile, 16),
        amax,
        16,
        tile,
        pow_2_scales=False,
        row_scaled_nvfp4=row_scaled,
        nvfp4_use_4over6=quantizer.nvfp4_use_4over6,
        nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
        nvfp4_4over6_err_mode=quantizer.nvfp4_4over6_err_mode,
        eps=0.0,
    )
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1)[: seen.shape[0], : seen.shape[1]]
    scales = scales[: seen.shape[0]].view(torch.uint8)
    if quantizer.stochastic_rounding:
        codes = _by_chance(seen, scales, amax)
    return Copy(usage, codes, scales, (1, 16), amax)


def _by_chance(seen: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Up or down to a neighbor, as likely as it is near."""
    encode = (448.0 * 6.0 / amax).clamp(max=FLOAT_MAX)
    inverse = (1 / (scales.view(torch.float8_e4m3fn).float() / encode)).clamp(max=FLOAT_MAX)
    scaled = _times(seen.float(), inverse, (1, 16)).clamp(-6.0, 6.0)
    steps = E2M1[:8]
    below = (torch.searchsorted(steps, scaled.abs(), right=True) - 1).clamp(0, 6)
    share = (scaled.abs() - steps[below]) / (steps[below + 1] - steps[below])
    magnitude = below + (torch.rand(seen.shape, generator=_DICE) < share)
    return (magnitude + 8 * (scaled.signbit())).to(torch.uint8)


_CASTS = {Float8BlockQuantizer: _blockwise, MXFP8Quantizer: _mxfp8, NVFP4Quantizer: _nvfp4}


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """On its way to a GPU before it is dequantized, a tensor in blocks stays where it is."""
    return self if kwargs.keys() == {"device"} and not args else torch.Tensor.to(self, *args, **kwargs)


for _storage in (MXFP8TensorStorage, NVFP4TensorStorage):
    _storage.to = _to

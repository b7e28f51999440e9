"""Run the hot loops on each kind of device: count a tensor's bit patterns in a histogram, and compute its sums. Internal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..errors import warn
from ..numerics import tensor_scaling
from ..numerics.block_scaling import (
    WHOLE_ROW,
    BlockScalingRule,
    count_block_scales,
    view_as_matrix,
)
from ..numerics.formats import DecodedCodes, FloatFormat
from ..numerics.histogram import BINS, DTYPES, Histogram
from ..numerics.metrics import (
    MomentsFound,
    QuantizationSums,
    SumsFound,
    compute_amax,
    compute_finite_amax,
    compute_float32_moments,
    quantization_sums_of_codes,
    quantization_sums_of_counts,
    quantization_sums_of_float32,
)
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling, Unscaled
from . import torch_fallback
from .cpu import blocks, quantize
from .cpu import histogram as cpu_histogram
from .memory import take_empty_histogram, view_bits

#: what each CUDA kernel does with tensors, as a warning describes it
_DONE = {"histogram": "counted", "blocks": "measured in blocks", "float32": "measured in float32"}
#: with fewer columns than this, making a contiguous copy costs less than counting row by row
SHORT = 64


class CudaKernel(Protocol):
    """A CUDA kernel of this package."""

    def run_kernel_once(self, device: torch.device) -> None:
        """Run the kernel once on a device. Raise an error if Numba cannot use the device."""


class BlockKernel(Protocol):
    """A kernel that measures an operand in blocks."""

    def block_quantization_sums(
        self, x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Any
    ) -> SumsFound:
        """Return the result of `quantization_sums_in_blocks`. The order of additions may differ.

        Args:
            counted: the histogram of `x`. The fallback to plain torch operations ignores this argument.
        """


def count_histogram(x: torch.Tensor) -> Histogram:
    """Return the histogram of the magnitudes of `x`. Read `x` only once if it is bfloat16 or float16.

    Args:
        x: any shape and strides. If its dtype is not bfloat16 or float16, we round it to bfloat16 and set `rounded`.
    """
    rounded = x.dtype not in DTYPES
    dtype = torch.bfloat16 if rounded else x.dtype
    # On a CPU, NumPy's zeros are cheap, because the system supplies zeroed memory and most bins are never touched.
    on_cpu = x.device.type == "cpu"
    counts = torch.from_numpy(np.zeros(BINS, np.int64)) if on_cpu else take_empty_histogram(x.device)
    result = Histogram(dtype, counts, rounded)
    add_to_histogram(result, x)
    return result


def add_to_histogram(histogram: Histogram, x: torch.Tensor) -> None:
    """Count the magnitudes of `x` into an existing histogram, after converting `x` to the histogram's dtype."""
    values = x.detach()
    if values.dtype != histogram.dtype:
        values = values.to(histogram.dtype)
    contiguous = values.is_contiguous()
    if x.device.type != "cpu":
        values = values if contiguous else _in_order_of_memory(values).contiguous()
        _count_on_device(values, histogram)
    elif contiguous and (n := values.numel()) < cpu_histogram.SMALL and (address := values.data_ptr()):
        cpu_histogram.count_bit_patterns_if_small(address, n, histogram.counts.data_ptr())
    else:
        rows = _in_rows(_in_order_of_memory(values))
        cpu_histogram.count_bit_patterns(view_bits(rows), histogram.counts.numpy(), torch.get_num_threads())


def _count_on_device(values: torch.Tensor, histogram: Histogram) -> None:
    if kernel := _kernel_on(values.device, "histogram"):
        kernel.count_bit_patterns(values, histogram.counts, histogram.infinity_bin)
    else:
        torch_fallback.count_bit_patterns(values.reshape(-1).view(torch.int16), histogram.counts)


def count_nonfinite(histogram: Histogram) -> torch.Tensor | int:
    """Return the number of non-finite values counted so far. On a device, return a tensor without host synchronization."""
    end = histogram.infinity_bin
    if histogram.counts.device.type == "cpu":
        return int(cpu_histogram.sum_last_counts(histogram.counts.data_ptr(), end))
    return histogram.counts[end:].sum()


@functools.cache
def _kernel_on(device: torch.device, module: str) -> Any:
    """Return the module of our kernel for a device, or None if the kernel does not run there.

    The first call runs the kernel once to find out.
    """
    if device.type != "cuda" or not torch.version.cuda:
        return None
    try:
        kernel: CudaKernel = _cuda_kernel(module)
        kernel.run_kernel_once(device)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        extra = f"cuda{torch.version.cuda.partition('.')[0]}"
        warn(
            f"Numba cannot use {device} ({why}). Its tensors are {_DONE[module]} by plain torch operations, and a sampled "
            f"step may take as long as ten other steps. Install what Numba needs with pip install 'nemo_fp8_debug[{extra}]'"
        )
        return None
    return kernel


def _cuda_kernel(name: str) -> Any:
    from .cuda import blocks, float32, histogram

    return {"histogram": histogram, "blocks": blocks, "float32": float32}[name]


def measure_float32_moments(x: torch.Tensor) -> MomentsFound:
    """Return the moments of a float32 tensor as one row on its device, without host synchronization. The median is NaN."""
    kernel = _kernel_on(x.device, "float32")
    found: MomentsFound = (kernel.measure_float32_moments if kernel else compute_float32_moments)(x)
    return found


def quantization_sums(
    x: torch.Tensor,
    scale: torch.Tensor | Unscaled | BlockScalingRule,
    role: str,
    fmt: FloatFormat,
    counted: Histogram | None = None,
) -> SumsFound:
    """Return an operand's quantization sums as one row on the device of `x`, without host synchronization.

    Args:
        x: [..., features], any floating dtype.
        scale: float32 scalar, or the rule that chooses the scales of blocks.
        role: role of the operand; the block shape depends on it.
        fmt: format of the codes.
        counted: the histogram of `x`, or None. If a kernel needs the histogram and it is None, we count `x` here.
    """
    if isinstance(scale, BlockScalingRule):
        kernel: BlockKernel = _block_kernel(x, scale, role)
        if counted is None and kernel is not torch_fallback:
            counted = count_histogram(x)
        return kernel.block_quantization_sums(x, scale, role, fmt, counted)
    if isinstance(scale, Unscaled):
        scale = torch.ones((), device=x.device)
    of_device = _kernel_on(x.device, "float32")
    sums_of = of_device.quantization_sums if of_device else quantization_sums_of_float32
    found: SumsFound = sums_of(x.float(), scale.to(x.device), fmt)
    return found


class CastRule(NamedTuple):
    """How an operand is cast: a float32 scale or the rule that chooses scales, and the format of the codes."""

    scale: torch.Tensor | CurrentScaling | BlockScalingRule
    format: FloatFormat
    #: whether an infinite value makes the amax infinite
    sees_infinity: bool = False

    def scale_of(self, x: torch.Tensor, found: MomentsFound | None = None) -> torch.Tensor | BlockScalingRule:
        """Return the scale of a tensor as a float32 scalar, without host synchronization. Return a block rule unchanged.

        Args:
            found: moments of `x`, if they are known. They contain the largest finite magnitude.
        """
        if not isinstance(self.scale, CurrentScaling):
            return self.scale
        if self.sees_infinity:
            return self.scale.compute_scale(compute_amax(x), self.format.max)
        return self.scale.compute_scale(
            found.summed_row.amax[0].float() if found else compute_finite_amax(x), self.format.max
        )


class MeasurementRequest(NamedTuple):
    """The measurements of a tensor that were requested in addition to its histogram."""

    role: str
    cast: CastRule
    #: values of the codes if the engine stores codes; None if each step casts the tensor again
    decoded: DecodedCodes | None
    #: what-if recipes; `tries_current`: whether to measure float32 values under what-if recipes with current scaling
    what_if: Sequence[Recipe]
    tries_current: bool
    #: how the copy for another product is cast, or None if this copy is not measured
    copy: CastRule | None
    counts_block_scales: bool
    #: whether the histogram of this call is later added to the histograms of other calls of the tensor
    joins_rest: bool


@dataclass(slots=True)
class ValueStats:
    """Measurements of a tensor in addition to its histogram.

    A field is None if its measurement was not requested, or if the histogram suffices for it.
    """

    moments: MomentsFound | None = None
    sums: SumsFound | None = None
    #: for a tensor whose histogram is added to others: its scale, and the sums of its own histogram under that scale
    scale: torch.Tensor | BlockScalingRule | None = None
    sums_of_counts: QuantizationSums | None = None
    #: how often each block scale occurs, int64 [257]
    block_scales: torch.Tensor | None = None
    #: sums under each what-if recipe, by the recipe's name
    what_if: dict[str, SumsFound] = field(default_factory=dict)
    copy: SumsFound | None = None


def measure_values(x: torch.Tensor, counted: Histogram, asked: MeasurementRequest) -> ValueStats:
    """Measure what histograms cannot answer: everything about float32 tensors, block recipes, and stored codes.

    Args:
        x: [..., features], bfloat16, float16 or float32.
        counted: the histogram of `x`.
    """
    found, cast, is_float32 = ValueStats(), asked.cast, x.dtype not in DTYPES
    rule = cast.scale if asked.decoded is None and isinstance(cast.scale, BlockScalingRule) else None
    if is_float32:
        found.moments = measure_float32_moments(x)
    measured = asked.decoded is None and (is_float32 or rule is not None)
    scale = cast.scale_of(x, found.moments) if measured or asked.joins_rest else None
    if asked.decoded is not None:
        found.sums = quantization_sums_of_codes(x, asked.decoded)
    if asked.joins_rest:
        found.scale = scale
        if isinstance(scale, torch.Tensor):
            found.sums_of_counts = quantization_sums_of_counts(counted, scale, cast.format)
    if asked.counts_block_scales and rule is not None:
        found.block_scales = count_block_scales(x, rule, asked.role, cast.format)
    if measured and scale is not None:
        found.sums = quantization_sums(x, scale, asked.role, cast.format, counted)
    is_part = asked.decoded is not None and x.dim() < 2  # its rows and blocks are not known
    for recipe in () if is_part else asked.what_if:
        by, fmt = recipe.scaling, recipe.get_format(asked.role)
        if is_float32 and asked.tries_current and isinstance(by, CurrentScaling):
            found.what_if[recipe.name] = quantization_sums(
                x, CastRule(by, fmt).scale_of(x, found.moments), asked.role, fmt, counted
            )
        elif isinstance(by, BlockScalingRule) or (is_float32 and isinstance(by, Unscaled)):
            found.what_if[recipe.name] = quantization_sums(x, by, asked.role, fmt, counted)
    if asked.copy is not None and (m := _columnwise(x, asked.copy.scale)) is not None:
        found.copy = quantization_sums(m, asked.copy.scale_of(m), asked.role, asked.copy.format)
    return found


def _columnwise(x: torch.Tensor, rule: torch.Tensor | CurrentScaling | BlockScalingRule) -> torch.Tensor | None:
    """Return the matrix that an engine casts to the copy that another GEMM uses as its operand, or None without such a copy.

    Under a block rule, the blocks of the copy run along the columns of `x`.
    """
    m = view_as_matrix(x)
    if not isinstance(rule, BlockScalingRule):
        return m
    return rule.transpose_for_columnwise(m).contiguous() if rule.casts_columnwise(m) else None


def _block_kernel(x: torch.Tensor, rule: BlockScalingRule, role: str) -> BlockKernel:
    """Return the module that measures a tensor in blocks on its device. Our CUDA kernel does not support whole rows."""
    if rule.rounds_stochastically or rule.has_value_dependent_scales or x.dtype not in DTYPES or not x.numel():
        return torch_fallback
    if x.device.type == "cpu":
        return blocks
    return torch_fallback if rule.get_block_shape(role)[1] == WHOLE_ROW else _kernel_on(x.device, "blocks") or torch_fallback


def quantize_dequantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return exactly the result of `tensor_scaling.quantize_dequantize`. On a CPU, read `x` only once if its memory has no
    gaps.

    Args:
        x: any shape and floating dtype.
        scale: float32 scalar.
    """
    if fmt.bits == 8 and scale.is_cpu and _has_cpu_loop(x):
        return quantize.quantize_dequantize(x, float(scale), float(1.0 / scale), fmt, torch.get_num_threads())
    return tensor_scaling.quantize_dequantize(x, scale, fmt)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return the result of `numerics.metrics.compute_amax`. On a CPU, read `x` only once if its memory has no gaps."""
    return quantize.amax(x, torch.get_num_threads()) if _has_cpu_loop(x) else compute_amax(x)


def _has_cpu_loop(x: torch.Tensor) -> bool:
    return (
        type(x) is torch.Tensor  # subclasses may have no memory of their own
        and x.is_cpu
        and x.dtype in quantize.DTYPES
        and x.numel() > 0
        and _in_order_of_memory(x).is_contiguous()
        and x.data_ptr() != 0
    )


def _in_order_of_memory(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with its axes in order of their strides. If the memory of `x` has no gaps, the result is contiguous."""
    return x if x.is_contiguous() else x.permute(sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as [rows, columns]: one row if `x` is contiguous, or a copy if rows are short or unevenly spaced."""
    if x.is_contiguous() or x.shape[-1] < SHORT:
        return x.reshape(1, -1)
    return x[None] if x.dim() == 1 else x.flatten(0, -2)

"""The hot loops on each kind of device: a tensor's bit patterns counted into a histogram, sums of values. Internal."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..errors import warn
from ..numerics import tensor_scaling
from ..numerics.block_scaling import CHUNK, WHOLE_ROW, BlockRule, quantization_sums_in_blocks
from ..numerics.formats import FloatFormat
from ..numerics.histogram import BINS, DTYPES, Histogram, infinity_bin
from ..numerics.metrics import MomentsFound, SumsFound, moments_of_float32, quantization_sums_of_float32
from ..numerics.tensor_scaling import CurrentScaling, Unscaled, amax_of, finite_amax_of
from . import torch_fallback
from .cpu import blocks, quantize
from .cpu import histogram as cpu_histogram
from .empty_histograms import empty_histogram
from .memory import bits_of

#: what each kernel of a CUDA device does with tensors
_DONE = {"histogram": "counted", "blocks": "measured in blocks", "float32": "measured in float32"}
#: columns below which a copy without gaps costs less than counting row by row
SHORT = 64
#: values in rows that are measured at once, in float64: few launches on a device, and at most some 200 MiB of its memory
_CHUNK_OF_ROWS = 1 << 22


def histogram_of(x: torch.Tensor) -> Histogram:
    """Count the magnitudes of `x`, in one read of it where it is bfloat16 or float16.

    Args:
        x: any shape and strides; bfloat16, float16, or another floating dtype, which is rounded to bfloat16 and marked.
    """
    rounded = x.dtype not in DTYPES
    dtype = torch.bfloat16 if rounded else x.dtype
    # On a CPU numpy's zeros: memory that the system hands out zeroed, and most bins are never touched.
    on_cpu = x.device.type == "cpu"
    counts = torch.from_numpy(np.zeros(BINS, np.int64)) if on_cpu else empty_histogram(x.device)
    result = Histogram(dtype, counts, rounded)
    count_into(result, x)
    return result


def count_into(histogram: Histogram, x: torch.Tensor) -> None:
    """Add the magnitudes of `x` to a histogram of its dtype."""
    values = x.detach()
    if values.dtype != histogram.dtype:
        values = values.to(histogram.dtype)
    contiguous = values.is_contiguous()
    if x.device.type != "cpu":
        values = values if contiguous else _in_order_of_memory(values).contiguous()
        _count_on_device(values, histogram)
    elif contiguous and (n := values.numel()) < cpu_histogram.SMALL and (address := values.data_ptr()):
        cpu_histogram.count_few(address, n, histogram.counts.data_ptr())
    else:
        rows = _in_rows(_in_order_of_memory(values))
        cpu_histogram.count_patterns(bits_of(rows), histogram.counts.numpy(), torch.get_num_threads())


def _count_on_device(values: torch.Tensor, histogram: Histogram) -> None:
    if kernel := _kernel_on(values.device, "histogram"):
        kernel.count_patterns(values, histogram.counts, infinity_bin(histogram.dtype))
    else:
        torch_fallback.count_patterns(values.reshape(-1).view(torch.int16), histogram.counts)


def nonfinite(histogram: Histogram) -> torch.Tensor | int:
    """How many values that are not finite were counted so far; on a device a tensor, without host synchronization."""
    end = infinity_bin(histogram.dtype)
    if histogram.counts.device.type == "cpu":
        return int(cpu_histogram.last_counts(histogram.counts.data_ptr(), end))
    return histogram.counts[end:].sum()


@functools.cache
def _kernel_on(device: torch.device, module: str) -> Any:
    """The module of a kernel of our own for a device; None where it does not run there. Tried once, with something to do."""
    if device.type != "cuda" or not torch.version.cuda:
        return None
    try:
        kernel = _cuda_kernel(module)
        kernel.try_out(device)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        extra = f"cuda{torch.version.cuda.partition('.')[0]}"
        warn(
            f"tensors on {device} are {_DONE[module]} by plain torch operations, so that a sampled step may take as long as "
            f"ten, since Numba cannot use the device ({why}); what it needs comes with "
            f"pip install 'nemo_fp8_debug[{extra}]'"
        )
        return None
    return kernel


def _cuda_kernel(name: str) -> Any:
    from .cuda import blocks, float32, histogram

    return {"histogram": histogram, "blocks": blocks, "float32": float32}[name]


def moments(x: torch.Tensor) -> MomentsFound:
    """Moments (one row, on x's device) of a float32 tensor; no host synchronization. The median is NaN."""
    kernel = _kernel_on(x.device, "float32")
    found: MomentsFound = (kernel.moments if kernel else moments_of_float32)(x)
    return found


def quantization_sums(
    x: torch.Tensor,
    scale: torch.Tensor | CurrentScaling | Unscaled | BlockRule,
    role: str,
    fmt: FloatFormat,
    counted: Histogram | None = None,
) -> SumsFound:
    """Sums (one row, on x's device) of an operand, straight from its values; no host synchronization.

    Args:
        x: [..., features], any floating dtype.
        scale: float32 scalar, or the rule that finds scales.
        role: of the operand, which blocks depend on.
        fmt: format of the codes.
        counted: the histogram of `x`, where there is one; the kernels of block sums take it, and `x` would be counted first.
    """
    if isinstance(scale, BlockRule):
        if scale.rounds_by_chance or scale.by_values:
            return quantization_sums_in_blocks(x, scale, role, fmt)
        in_rows = scale.block(role)[1] == WHOLE_ROW  # for which there is no kernel on devices
        if x.dtype in DTYPES and not in_rows and (kernel := _kernel_on(x.device, "blocks")):
            return kernel.block_sums(x, scale, role, fmt, counted or histogram_of(x))  # type: ignore[no-any-return]
        if x.device.type == "cpu" and x.dtype in DTYPES and x.numel():
            return blocks.quantization_sums_in_blocks(x, scale, role, fmt, counted or histogram_of(x))
        return quantization_sums_in_blocks(x, scale, role, fmt, _CHUNK_OF_ROWS if in_rows else CHUNK)
    if isinstance(scale, Unscaled):
        scale = torch.ones((), device=x.device)
    if isinstance(scale, CurrentScaling):
        scale = scale.scale(finite_amax_of(x), fmt.max)
    kernel = _kernel_on(x.device, "float32")
    sums_of = kernel.quantization_sums if kernel else quantization_sums_of_float32
    found: SumsFound = sums_of(x.float(), scale.to(x.device), fmt)
    return found


def quantize_dequantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """`numerics.tensor_scaling.quantize_dequantize`, bit for bit; on a CPU in one read of `x` where it has no gaps.

    Args:
        x: any shape and floating dtype.
        scale: float32 scalar.
    """
    if fmt.bits == 8 and scale.is_cpu and _has_cpu_loop(x):
        return quantize.quantize_dequantize(x, float(scale), float(1.0 / scale), fmt, torch.get_num_threads())
    return tensor_scaling.quantize_dequantize(x, scale, fmt)


def amax(x: torch.Tensor) -> torch.Tensor:
    """`numerics.tensor_scaling.amax_of`; on a CPU in one read of `x` where it has no gaps."""
    return quantize.amax(x, torch.get_num_threads()) if _has_cpu_loop(x) else amax_of(x)


def _has_cpu_loop(x: torch.Tensor) -> bool:
    return (
        type(x) is torch.Tensor  # others may have no memory of their own
        and x.is_cpu
        and x.dtype in quantize.DTYPES
        and x.numel() > 0
        and _in_order_of_memory(x).is_contiguous()
        and x.data_ptr() != 0
    )


def _in_order_of_memory(x: torch.Tensor) -> torch.Tensor:
    """The same values, axes in order of their strides: contiguous where `x` fills its memory, however it was transposed."""
    return x.permute(sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """As [rows, columns]: one row where `x` is contiguous; a copy where rows are short, or not evenly apart."""
    if x.is_contiguous() or x.shape[-1] < SHORT:
        return x.reshape(1, -1)
    return x[None] if x.dim() == 1 else x.flatten(0, -2)

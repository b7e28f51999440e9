"""Multiply-adds of torch's operators, from the shapes of their arguments; nothing is read from a device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: multiply-adds of a call, and those among them that a backward does again of the forward
Size = tuple[float, float]


def _product(*sizes: int) -> Size:
    return float(math.prod(sizes)), 0.0


def _mm(a: Any, b: Any) -> Size:
    """Of matrices, vectors and batches: all values of one, for each column of the other."""
    return _product(*a.shape, b.shape[-1] if b.dim() > 1 else 1)


def _grouped(a: Any, b: Any) -> Size:
    """Rows past the last group count as well: where that ends is on the device."""
    return _product(*a.shape, b.shape[-1])


def _linear(args: Sequence[Any]) -> Size:
    return _product(*args[0].shape, args[1].shape[0])


def _attention(q: Any, k: Any, v: Any) -> Size:
    """Scores and values, all of them: a causal mask is not taken off."""
    *outer, queries, width = q.shape
    return _product(*outer, queries, k.shape[-2], width + v.shape[-1])


def _attention_backward(args: Sequence[Any]) -> Size:
    """Four products, and the scores again."""
    q, k, v = args[1:4]
    forward, _ = _attention(q, k, v)
    return 2 * forward, math.prod((*q.shape[:-1], k.shape[-2], q.shape[-1]))


def _convolution(args: Sequence[Any]) -> Size:
    """Each output is a product with `weight.shape[1:]`; a transposed one turns inputs and outputs around."""
    x, weight, transposed = args[0].shape, args[1].shape, args[6]
    if transposed:
        return _product(*x, *weight[1:])
    strides, paddings, dilations = (_each(values, len(weight) - 2) for values in args[3:6])
    places = [
        (n + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for n, kernel, stride, pad, dilation in zip(x[2:], weight[2:], strides, paddings, dilations, strict=True)
    ]
    return _product(x[0], *places, *weight)


def _each(values: Any, dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)


def _convolution_backward(args: Sequence[Any]) -> Size:
    """As many for the input's gradient as for the weight's; `output_mask` says which of them are asked for."""
    dy, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    once = math.prod((*x.shape, *weight.shape[1:])) if transposed else math.prod((*dy.shape, *weight.shape[1:]))
    return float(once * sum(mask[:2])), 0.0


def _first_two(at: int, size: Callable[[Any, Any], Size] = _mm) -> Callable[[Sequence[Any]], Size]:
    return lambda args: size(args[at], args[at + 1])


def _of_attention(args: Sequence[Any]) -> Size:
    return _attention(*args[:3])


_KNOWN: dict[str, Callable[[Sequence[Any]], Size]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_scaled_mm", "_int_mm"), _first_two(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation", "addmm_"), _first_two(1)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _first_two(0, _grouped)),
    "linear": _linear,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _of_attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
}

#: names of operators that multiply matrices, as far as names tell
_LOOKS_LIKE_A_PRODUCT = re.compile(r"mm(?:_|$)|matmul|linear|conv|attention|einsum|lstm|gru|rnn|bilinear|encoder_layer")
_NO_PRODUCT = re.compile(r"upsample|grid|pool|interpolate|linear1d|bilinear2d|trilinear|linspace|comm|convert")


def size_of(operator: Any, args: Sequence[Any]) -> Size | None:
    """Multiply-adds of a call; None: it is no product, or an unknown one, see `is_unknown`."""
    namespace, _, name = str(operator.name()).partition("::")
    count = _KNOWN.get(name.partition(".")[0]) if namespace == "aten" else None
    return None if count is None or not all(isinstance(a, torch.Tensor) for a in args[:2]) else count(args)


def is_unknown(operator: Any) -> bool:
    """Whether an operator looks as if it multiplied matrices, and its multiply-adds are not known here."""
    namespace, _, name = str(operator.name()).partition("::")
    name = name.partition(".")[0]
    known = namespace == "aten" and name in _KNOWN
    return not known and bool(_LOOKS_LIKE_A_PRODUCT.search(name)) and not _NO_PRODUCT.search(name)

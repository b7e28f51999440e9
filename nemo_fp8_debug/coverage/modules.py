"""What modules that no backend owns multiply."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..capture.backends.base import is_plain
from ..capture.backends.in_forward import NO_MATRIX, is_conv1d
from ..capture.scan import ScannedModule, find_inside
from .experts import experts_of_a_token, meets_all
from .ledger import HIGH_PRECISION, POSITION, UNKNOWN, Entry
from .parameters import needs_gradient, shape_of

#: modules whose matrices are looked up and not multiplied, and the output projection that MultiheadAttention multiplies
_ELSEWHERE = (nn.Embedding, nn.EmbeddingBag, NonDynamicallyQuantizableLinear)

SCORES = "attention scores, which grow with the sequence length"
FP8_SCORES = "FP8 attention, whose kernels show no operand"
FUNCTIONS = "products of functions in forward code, which modules do not show"
_MULTIHEAD = "projections inside nn.MultiheadAttention, which runs as one function"
_CONVOLUTION = "convolutions"
_WHOLE = "experts in parameters of three dimensions"
_WHOLE_UNKNOWN = "parameters of three dimensions in a class that is not known"
IF_MULTIPLIED = "parameters in a class that is not known, which are observed if operators of torch multiply them"
_GROUPED = "experts side by side in one matrix"
_MATRIX = "matrices in a class that is not known, which may be multiplied"
_CODES = "matrices of 8-bit numbers that are no parameters, which may be codes that are multiplied"
_ROUTER = "routers, which multiply in a function"
_CONV1D = "linear layers of transformers' class Conv1D"


def entries_of(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[Entry]:
    """What a module that no backend owns multiplies itself, without its children.

    Args:
        around: the modules that it is in, innermost first.
    """
    trained = needs_gradient(module)
    if isinstance(module, nn.MultiheadAttention):
        yield from _of_multihead(name, module)
    elif isinstance(module, _ConvNd):
        weight = module._parameters.get("weight")
        shape = (_shape_of_convolution(module) if weight is None else shape_of(weight)) or ()
        # Of a transposed one, how many products a position of the output has depends on where it is.
        size = (math.prod(shape) or None) if shape and not isinstance(module, _ConvTransposeNd) else None
        status = _precision(module, weight)
        yield Entry(name, "convolution", status, _CONVOLUTION, 1, shape, size, POSITION, trained, name)
    elif isinstance(module, _ELSEWHERE) or _is_of_megatron(module, "VocabParallelEmbedding"):
        return
    elif is_conv1d(module):
        shape = shape_of(module._parameters["weight"]) or ()
        yield Entry(
            name,
            "linear",
            _of_plain(module._parameters["weight"]),
            _CONV1D,
            1,
            shape,
            math.prod(shape) or None,
            trained=trained,
            first=name,
        )
    elif _is_of_megatron(module, "GroupedMLP"):
        yield from _of_grouped_mlp(name, module, around)
    else:
        yield from _of_parameters(name, module, around)


def _is_of_megatron(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name and type(module).__module__.startswith("megatron.core.")


def _precision(module: nn.Module, parameter: torch.Tensor | None) -> str:
    """Torch's own modules multiply in the type of their tensors; others may quantize."""
    return _of_plain(parameter) if type(module).__module__.startswith("torch.nn.modules.") else UNKNOWN


def _of_plain(parameter: torch.Tensor | None) -> str:
    return HIGH_PRECISION if is_plain(parameter) else UNKNOWN


def _shape_of_convolution(module: _ConvNd) -> tuple[int, ...] | None:
    """Return the shape of a weight that is computed in each call, as under weight norm; None: sizes are not known yet."""
    channels = module.out_channels, module.in_channels
    first, second = reversed(channels) if module.transposed else channels
    shape = (first, second // module.groups, *module.kernel_size)
    return shape if all(shape) else None


def _of_multihead(name: str, module: nn.MultiheadAttention) -> Iterator[Entry]:
    """Its projections of queries, keys and values, and that of the output, which is a Linear that is never called."""
    matrices = {n: p for n, p in module._parameters.items() if p is not None and n.endswith("proj_weight")} | {
        "out_proj": module.out_proj.weight
    }
    for matrix, parameter in matrices.items():
        whole = f"{name}.{matrix.removesuffix('_weight')}"
        shape = shape_of(parameter) or ()
        size = math.prod(shape) or None
        trained = parameter.requires_grad
        yield Entry(
            whole, "attention", _precision(module, parameter), _MULTIHEAD, 1, shape, size, trained=trained, first=whole
        )


def _of_grouped_mlp(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[Entry]:
    """All experts of a rank side by side in two matrices."""
    here = getattr(module, "num_local_experts", 0)
    met = experts_of_a_token(around)
    for key, parameter in module._parameters.items():
        shape, whole = shape_of(parameter) or (), f"{name}.{key}"
        size = math.prod(shape) * met / here if met and here and shape else None
        trained = needs_gradient(module)
        yield Entry(whole, "experts", _of_plain(parameter), _GROUPED, 1, shape, size, trained=trained, first=whole)


def _of_parameters(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[Entry]:
    for key, parameter in module._parameters.items():
        shape = shape_of(parameter)
        whole = f"{name}.{key}"
        if shape is None or len(shape) < 2 or min(shape) < 2 or NO_MATRIX.search(key.lower()):
            continue
        if len(shape) == 3:
            yield _of_whole_experts(whole, module, shape, around)
        elif re.search(r"Top[kK]Router$", type(module).__name__) and len(shape) == 2:
            yield Entry(whole, "other", _of_plain(parameter), _ROUTER, 1, shape, math.prod(shape), first=whole)
        else:
            yield Entry(whole, "other", UNKNOWN, _MATRIX, 1, shape, first=whole)
    for key, buffer in module._buffers.items():
        if buffer is not None and _may_be_codes(buffer):
            yield Entry(f"{name}.{key}", "other", UNKNOWN, _CODES, 1, tuple(buffer.shape), first=f"{name}.{key}")


def _may_be_codes(x: torch.Tensor) -> bool:
    """Whether it is a matrix of 8-bit numbers."""
    return x.dim() == 2 and min(x.shape) > 1 and x.element_size() == 1 and x.dtype != torch.bool


def _of_whole_experts(name: str, module: nn.Module, shape: tuple[int, ...], around: Sequence[nn.Module]) -> Entry:
    every, status = meets_all(module), _of_plain(module._parameters[name.rpartition(".")[2]])
    if every is None:
        return Entry(name, "experts" if "expert" in name.lower() else "other", UNKNOWN, _WHOLE_UNKNOWN, 1, shape, first=name)
    met = shape[0] if every else experts_of_a_token(around)
    size = None if met is None else float(shape[1] * shape[2] * met)
    return Entry(name, "experts", status, _WHOLE, 1, shape, size, trained=needs_gradient(module), first=name)


def find_scores(scanned: Iterable[ScannedModule]) -> set[int]:
    """Return the ids of modules that compute attention scores: the innermost ones that call themselves attention.

    Transformer Engine's `DotProductAttention` counts as that: the modules in it are ways to compute the same.
    """
    found = {id(m): m for one in scanned if _is_attention(m := one.module) and not _is_choice(m)}
    return {key for key, module in found.items() if not found.keys() & find_inside(module)}


def _is_choice(module: nn.Module) -> bool:
    """Whether it is one of several ways to compute attention, inside Transformer Engine's."""
    names = ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")
    return type(module).__module__.startswith("transformer_engine.") and type(module).__name__ in names


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()

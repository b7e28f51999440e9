"""List the products of modules that no backend supports, and read the sizes of products of all modules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..capture.backends.base import is_plain_tensor
from ..capture.backends.in_forward import NO_MATRIX, is_conv1d
from ..capture.scan import ScannedModule, list_inner_module_ids
from .ledger import HIGH_PRECISION, POSITION, UNKNOWN, CoverageEntry

#: modules without an entry of their own: embeddings multiply nothing, and
#: MultiheadAttention multiplies by the weight of its NonDynamicallyQuantizableLinear
_ELSEWHERE = (nn.Embedding, nn.EmbeddingBag, NonDynamicallyQuantizableLinear)

SCORES = "attention scores, which grow with the sequence length"
FP8_SCORES = "FP8 attention, whose kernels show no operand"
FUNCTIONS = "products of functions in forward code, which modules do not show"
_MULTIHEAD = "projections inside nn.MultiheadAttention, which runs as one function"
_CONVOLUTION = "convolutions"
_WHOLE = "experts in parameters of three dimensions"
_WHOLE_UNKNOWN = "parameters of three dimensions in an unknown class"
IF_MULTIPLIED = "parameters in an unknown class, which are observed if operators of torch multiply them"
_GROUPED = "experts side by side in one matrix"
_MATRIX = "matrices in an unknown class, which may be multiplied"
_CODES = "8-bit matrices that are not parameters, perhaps codes that the model multiplies"
_ROUTER = "routers, which multiply in a function"
_CONV1D = "linear layers of transformers' class Conv1D"


def list_coverage_entries(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[CoverageEntry]:
    """Yield the entries of a module that no backend supports. Its submodules have their own entries.

    Args:
        around: the modules that contain `module`, innermost first.
    """
    trained = needs_gradient(module)
    if isinstance(module, nn.MultiheadAttention):
        yield from _of_multihead(name, module)
    elif isinstance(module, _ConvNd):
        weight = module._parameters.get("weight")
        shape = (_shape_of_convolution(module) if weight is None else shape_of(weight)) or ()
        # For a transposed convolution, the number of products depends on the position in the output.
        size = (math.prod(shape) or None) if shape and not isinstance(module, _ConvTransposeNd) else None
        status = _precision(module, weight)
        yield CoverageEntry(name, "convolution", status, _CONVOLUTION, 1, shape, size, POSITION, trained, name)
    elif isinstance(module, _ELSEWHERE) or _is_of_megatron(module, "VocabParallelEmbedding"):
        return
    elif is_conv1d(module):
        weight = module._parameters["weight"]
        yield _of_matrix(name, "linear", _of_plain(weight), _CONV1D, weight, trained)
    elif _is_of_megatron(module, "GroupedMLP"):
        yield from _of_grouped_mlp(name, module, around)
    else:
        yield from _of_parameters(name, module, around)


def _is_of_megatron(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name and type(module).__module__.startswith("megatron.core.")


def _precision(module: nn.Module, parameter: torch.Tensor | None) -> str:
    """Return the status of a module. Torch's own modules multiply in their tensors' dtype. For others, return UNKNOWN."""
    return _of_plain(parameter) if type(module).__module__.startswith("torch.nn.modules.") else UNKNOWN


def _of_plain(parameter: torch.Tensor | None) -> str:
    return HIGH_PRECISION if is_plain_tensor(parameter) else UNKNOWN


def _shape_of_convolution(module: _ConvNd) -> tuple[int, ...] | None:
    """Return the shape of a weight that is computed in each call, as under weight norm, or None if the shape is unknown."""
    channels = module.out_channels, module.in_channels
    first, second = reversed(channels) if module.transposed else channels
    shape = (first, second // module.groups, *module.kernel_size)
    return shape if all(shape) else None


def _of_multihead(name: str, module: nn.MultiheadAttention) -> Iterator[CoverageEntry]:
    """Yield entries of the query, key, value and output projections. The module computes them without calling a Linear."""
    matrices = {n: p for n, p in module._parameters.items() if p is not None and n.endswith("proj_weight")} | {
        "out_proj": module.out_proj.weight
    }
    for matrix, parameter in matrices.items():
        whole = f"{name}.{matrix.removesuffix('_weight')}"
        yield _of_matrix(whole, "attention", _precision(module, parameter), _MULTIHEAD, parameter, parameter.requires_grad)


def _of_matrix(name: str, kind: str, status: str, reason: str, parameter: Any, trained: bool = True) -> CoverageEntry:
    """Return the entry of a matrix that is multiplied once for each token."""
    shape = shape_of(parameter) or ()
    return CoverageEntry(name, kind, status, reason, 1, shape, math.prod(shape) or None, trained=trained, first=name)


def _of_grouped_mlp(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[CoverageEntry]:
    """Yield the entries of a rank's experts. Each of the two matrices contains all experts side by side."""
    here = getattr(module, "num_local_experts", 0)
    met = count_experts_per_token(around)
    for key, parameter in module._parameters.items():
        shape, whole = shape_of(parameter) or (), f"{name}.{key}"
        size = math.prod(shape) * met / here if met and here and shape else None
        trained = needs_gradient(module)
        yield CoverageEntry(whole, "experts", _of_plain(parameter), _GROUPED, 1, shape, size, trained=trained, first=whole)


def _of_parameters(name: str, module: nn.Module, around: Sequence[nn.Module]) -> Iterator[CoverageEntry]:
    for key, parameter in module._parameters.items():
        shape = shape_of(parameter)
        whole = f"{name}.{key}"
        if shape is None or len(shape) < 2 or min(shape) < 2 or NO_MATRIX.search(key.lower()):
            continue
        if len(shape) == 3:
            yield _of_whole_experts(whole, module, shape, around)
        elif re.search(r"Top[kK]Router$", type(module).__name__) and len(shape) == 2:
            yield _of_matrix(whole, "other", _of_plain(parameter), _ROUTER, parameter)
        else:
            yield CoverageEntry(whole, "other", UNKNOWN, _MATRIX, 1, shape, first=whole)
    for key, buffer in module._buffers.items():
        if buffer is not None and _may_be_codes(buffer):
            yield CoverageEntry(f"{name}.{key}", "other", UNKNOWN, _CODES, 1, tuple(buffer.shape), first=f"{name}.{key}")


def _may_be_codes(x: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix of 8-bit numbers, which may be codes."""
    return x.dim() == 2 and min(x.shape) > 1 and x.element_size() == 1 and x.dtype != torch.bool


def _of_whole_experts(name: str, module: nn.Module, shape: tuple[int, ...], around: Sequence[nn.Module]) -> CoverageEntry:
    every, status = meets_all(module), _of_plain(module._parameters[name.rpartition(".")[2]])
    if every is None:
        return CoverageEntry(
            name, "experts" if "expert" in name.lower() else "other", UNKNOWN, _WHOLE_UNKNOWN, 1, shape, first=name
        )
    met = shape[0] if every else count_experts_per_token(around)
    size = None if met is None else float(shape[1] * shape[2] * met)
    return CoverageEntry(name, "experts", status, _WHOLE, 1, shape, size, trained=needs_gradient(module), first=name)


def find_attention_score_modules(scanned: Iterable[ScannedModule]) -> set[int]:
    """Return the ids of modules that compute attention scores: the innermost modules with "attention" in their class name.

    Transformer Engine's `DotProductAttention` counts as innermost, because its submodules are alternative ways to compute
    the same scores.
    """
    modules = [one.module for one in scanned if "attention" in type(one.module).__name__.lower()]
    found = {id(module): module for module in modules if not _is_choice(module)}
    return {key for key, module in found.items() if not found.keys() & list_inner_module_ids(module)}


def _is_choice(module: nn.Module) -> bool:
    """Return whether a module is one of the alternatives inside Transformer Engine's `DotProductAttention`."""
    names = ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")
    return type(module).__module__.startswith("transformer_engine.") and type(module).__name__ in names


# --- sizes of parameters, wherever an engine keeps the values -------------------------------------------------------------


def shape_of(parameter: Any) -> tuple[int, ...] | None:
    """Return the shape of a parameter, or None if the shape is unknown before the first call.

    DeepSpeed empties parameters, and keeps their original shapes in an attribute.
    """
    if parameter is None or is_lazy(parameter):
        return None
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def read_linear_shape(module: nn.Module, part: str = "") -> tuple[int, ...] | None:
    """Return the numbers of outputs and inputs of a linear module or of its part, or None if they are unknown."""
    own = module._parameters
    found = shape_of(own.get(_weight_name(part))) if part or not isinstance(module, nn.Linear) else None
    if found is not None and len(found) == 2 and min(found) > 0:
        return found
    if part:
        return None
    sizes = [
        (getattr(module, f"output_size{local}", None), getattr(module, f"input_size{local}", None))
        for local in ("_per_partition", "")
    ]
    sizes.append((getattr(module, "out_features", None), getattr(module, "in_features", None)))
    if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):  # ranks split one of the two sizes
        sizes = [(sizes[0][0] or sizes[1][0], sizes[0][1] or sizes[1][1])]
    return next(((o, i) for o, i in sizes if isinstance(o, int) and isinstance(i, int) and o and i), None)


def count_matrix_parts_over_ranks(module: nn.Module, around: Sequence[nn.Module]) -> int | None:
    """Return the number of parts into which ranks split a module's matrix, or None if it is unknown.

    Tensor parallelism splits a weight that is a DTensor. FSDP2 splits each of these parts again, but gathers its smaller
    parts before the product.

    Args:
        around: the modules that contain `module`.
    """
    weight: Any = module._parameters.get("weight")
    if not hasattr(weight, "placements") or not isinstance(module, nn.Linear):
        return 1  # in other layers, the parameter contains only this rank's part
    gathered = _dimensions_gathered((module, *around))
    if gathered is None:
        return None
    of_mesh = zip(weight.placements, weight.device_mesh.shape, strict=True)
    ranks: int = math.prod(size for placement, size in list(of_mesh)[gathered:] if placement.is_shard())
    return ranks


def _dimensions_gathered(modules: Sequence[nn.Module]) -> int | None:
    """Return the number of leading mesh dimensions over which the innermost FSDP2 module gathers a parameter."""
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            state = getattr(module, "_get_fsdp_state")()  # noqa: B009 - torch declares attributes of nn.Module as tensors
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            if groups[0] is not None:
                mesh = getattr(getattr(groups[0], "mesh_info", None), "mesh", None)
                return None if mesh is None else int(mesh.ndim)
    return 0


def _weight_name(part: str) -> str:
    return f"weight{part}" if part.isdigit() else f"{part}_weight" if part else "weight"


def needs_gradient(module: nn.Module) -> bool:
    """Return whether a matrix of the module needs a gradient. Return True if the module has no matrix."""
    matrices = [p for name, p in module._parameters.items() if p is not None and not name.endswith("bias")]
    return not matrices or any(p.requires_grad for p in matrices)


# --- how many experts each token uses, by classes and options -------------------------------------------------------------

#: attributes of a router, or of its layer, that give the number of experts per token
_OF_MODULES = ("top_k", "topk", "num_experts_per_tok")
#: options of a configuration that give this number. Not `top_k`, because transformers uses that option for generation
_OF_OPTIONS = ("num_experts_per_tok", "moe_router_topk")
#: options that make experts multiply padding too, or drop tokens
_CAPACITY = ("moe_expert_capacity_factor", "expert_capacity", "capacity_factor")

#: classes with all experts in 3D parameters (one expert per first index), and whether every expert multiplies each token
WHOLE_EXPERTS = {
    ("transformers", "GptOssExperts"): False,  # in training; in eval mode on a GPU all experts multiply
    ("transformers", "Llama4TextExperts"): True,  # every expert receives every token
    ("torchtitan", "GroupedExperts"): False,
}


def count_experts_per_token(path: Sequence[nn.Module]) -> int | None:
    """Return the number of experts that each token uses, or None if no known option gives it.

    Args:
        path: the modules around an expert, innermost first.
    """
    for module in path:
        config = getattr(module, "config", None)
        if any(getattr(holder, name, None) for holder in (module, config) for name in _CAPACITY):
            return None
        values: list[Any] = [getattr(m, name, None) for m in (module, *module._modules.values()) for name in _OF_MODULES]
        values += [getattr(config, name, None) for name in _OF_OPTIONS]
        found = next(filter(_is_count, values), None)
        if found is not None:
            return int(found)
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def meets_all(module: nn.Module) -> bool | None:
    """Return whether every expert multiplies each token, for a module of `WHOLE_EXPERTS`. Return None for other modules."""
    kind = type(module)
    return WHOLE_EXPERTS.get((kind.__module__.partition(".")[0], kind.__name__))

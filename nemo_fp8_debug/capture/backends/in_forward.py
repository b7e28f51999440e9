"""Backend for modules that multiply parameters inside their forward, so that their arguments are not operands.

These are experts in parameters of three dimensions, `nn.MultiheadAttention`, and transformers' `Conv1D`. We observe their
operands at torch's operators (`capture.matmul_capture`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from .base import FrameworkBackend, is_plain_tensor, read_raw_weight

#: parameters that are never multiplied as matrices
NO_MATRIX = re.compile(r"(?:^|_)bias(?:es)?$|norm")
#: packages whose modules multiply three-dimensional parameters with their own kernels, or not at all
_OTHERS = ("transformer_engine", "torchao", "torch")


def is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear layer of GPT-2 and similar models."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def list_parameter_suffixes(module: nn.Module) -> Sequence[str]:
    """Return the name suffixes of a module's GEMMs: one for each parameter that the module may multiply."""
    if isinstance(module, nn.MultiheadAttention):
        inner = [name for name, p in module._parameters.items() if p is not None and name.endswith("proj_weight")]
        return [*(name.removesuffix("_weight") for name in inner), "out_proj"]
    if is_conv1d(module):
        return ("",)
    if type(module).__module__.partition(".")[0] in _OTHERS:
        return ()
    return [name for name, p in module._parameters.items() if p is not None and _is_of_experts(name, p)]


def _is_of_experts(name: str, parameter: torch.Tensor) -> bool:
    shape = parameter.shape
    return len(shape) == 3 and min(shape) > 1 and is_plain_tensor(parameter) and not NO_MATRIX.search(name.lower())


def is_weight_computed(module: nn.Module) -> bool:
    """Return True if a Linear computes its weight from other parameters, as with weight norm."""
    return (
        isinstance(module, nn.Linear)
        and read_raw_weight(module) is None
        and any(map(is_plain_tensor, computed_of(module).values()))
    )


def computed_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters from which a weight may be computed: all except biases and parameters of norms."""
    return {name: p for name, p in module.named_parameters() if not NO_MATRIX.search(name)}


def list_parameter_names(module: nn.Module, part: str) -> Sequence[str]:
    """Return the names of a part's parameter, or of the parameters that the part's weight is computed from."""
    return list(computed_of(module)) if is_weight_computed(module) else [find_parameter_name(module, part)]


def find_parameter_name(module: nn.Module, part: str) -> str:
    """Return the name of a part's parameter within its module."""
    if isinstance(module, nn.MultiheadAttention):
        return "out_proj.weight" if part == "out_proj" else f"{part}_weight"
    return part or "weight"


def read_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter by its name in a module, without calling a sharding engine."""
    path, _, key = name.rpartition(".")
    return read_raw_weight(module.get_submodule(path), key)


def _no_output(out: object) -> torch.Tensor:
    raise TypeError("its operands are inside its forward, so it has no output to observe")


BACKEND = FrameworkBackend(
    name="experts in parameters of three dimensions, nn.MultiheadAttention and transformers' Conv1D",
    owns=lambda module: bool(list_parameter_suffixes(module)),
    parts=list_parameter_suffixes,
    input=lambda module, args, kwargs, part: None,
    weight=lambda module, args, kwargs, part: read_parameter(module, find_parameter_name(module, part)),
    output=_no_output,
    in_forward=True,
)

"""Modules that multiply parameters inside their forward, where no argument and no output of theirs is an operand.

These are experts in parameters of three dimensions, `nn.MultiheadAttention`, and transformers' `Conv1D`. Their operands are
seen at the operators of torch (`capture.matmul_capture`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from .base import Backend, is_plain, read_raw_weight

#: parameters that are never multiplied as matrices
NO_MATRIX = re.compile(r"(?:^|_)bias(?:es)?$|norm")
#: packages whose modules have kernels of their own, or are known not to multiply such parameters
_OTHERS = ("transformer_engine", "torchao", "torch")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 and its like."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def parts(module: nn.Module) -> Sequence[str]:
    """What is added to the name of a module for each parameter that it may multiply."""
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
    return len(shape) == 3 and min(shape) > 1 and is_plain(parameter) and not NO_MATRIX.search(name.lower())


def is_computed(module: nn.Module) -> bool:
    """Whether a Linear computes its weight of other parameters, as under weight norm."""
    return (
        isinstance(module, nn.Linear)
        and read_raw_weight(module) is None
        and any(map(is_plain, computed_of(module).values()))
    )


def computed_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a weight may be computed of: all parameters of a module but its bias."""
    return {name: p for name, p in module.named_parameters() if not NO_MATRIX.search(name)}


def parameter_names(module: nn.Module, part: str) -> Sequence[str]:
    """The parameter of a part, or those that it is computed of."""
    return list(computed_of(module)) if is_computed(module) else [parameter_name(module, part)]


def parameter_name(module: nn.Module, part: str) -> str:
    """The parameter of a part, from its module on."""
    if isinstance(module, nn.MultiheadAttention):
        return "out_proj.weight" if part == "out_proj" else f"{part}_weight"
    return part or "weight"


def find_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter by its name in a module, without the getters of sharding engines."""
    path, _, key = name.rpartition(".")
    return read_raw_weight(module.get_submodule(path), key)


def _no_output(out: object) -> torch.Tensor:
    raise TypeError("operands are inside its forward, and its output is none")


BACKEND = Backend(
    name="experts in parameters of three dimensions, nn.MultiheadAttention and transformers' Conv1D",
    owns=lambda module: bool(parts(module)),
    parts=parts,
    input=lambda module, args, kwargs, part: None,
    weight=lambda module, args, kwargs, part: find_parameter(module, parameter_name(module, part)),
    output=_no_output,
    in_forward=True,
)

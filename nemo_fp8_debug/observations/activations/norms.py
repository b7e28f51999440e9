"""Find the norms of a model, and their inputs and outputs. The input of a pre-norm is the residual stream."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ...capture.backends.base import Args, Kwargs

#: end of the class names of norms that normalize over the channels of each token
_NORM = re.compile(r"(?<!batch)(?<!group)(?<!instance)norm\Z")
#: Transformer Engine's layers that begin with a norm
_FUSED = ("LayerNormLinear", "LayerNormMLP")


def list_norm_roles(module: nn.Module) -> tuple[str, ...]:
    """Return the roles of a norm to observe, or an empty tuple for other modules.

    For a norm inside a GEMM module, we observe only the input, because the output of the norm is the GEMM's X.
    """
    if any(base.__name__ in _FUSED for base in type(module).__mro__):
        return ("norm_input",)
    is_leaf = not any(True for _ in module.children())
    has_no_matrix = all(p is None or p.dim() <= 1 for p in module._parameters.values())
    named = _NORM.search(type(module).__name__.lower())
    return ("norm_input", "norm_output") if named and is_leaf and has_no_matrix else ()


def find_norm_input(args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Return the input of a norm.

    Raises:
        LookupError: the norm is called without a tensor.
    """
    return _first((*args, *kwargs.values()), "it is called without a floating-point tensor")


def find_norm_output(out: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a norm.

    Raises:
        LookupError: the output does not have the shape of the input.
    """
    found = _first(out if isinstance(out, tuple) else (out,), "it returns no floating-point tensor")
    if found.shape != x.shape:
        raise LookupError(f"its output has shape {tuple(found.shape)}, and its input {tuple(x.shape)}")
    return found


def sum_channel_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the number of rows and each channel's sum of squares, float64 [1 + C]. Channels are the last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64)
    return torch.cat([norms.new_tensor([len(rows)]), norms.square()])


def _first(values: Any, otherwise: str) -> torch.Tensor:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0:
            return value
    raise LookupError(otherwise)

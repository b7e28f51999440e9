"""What an optimizer steps by, of the weights of GEMMs: the parameter itself, or its float32 copy or part of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .backends.base import raw_weight
from .gemms import Gemm


def weight_of(gemm: Gemm) -> Any:
    """The parameter that a GEMM multiplies, as its module holds it; None: its name is not known."""
    if gemm.part and not gemm.part.isdigit():
        return None
    return raw_weight(gemm.module, f"weight{gemm.part}")


def stepped_by(optimizer: Any, gemms: Mapping[str, Gemm]) -> Iterator[tuple[str, Any, Any]]:
    """Name, weight, and what stands for it in the optimizer.

    Args:
        gemms: by name.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, gemm in gemms.items():
        weight = weight_of(gemm)
        for parameter in (weight, getattr(weight, "main_param", None)):
            if parameter is not None and id(parameter) in held:
                yield name, weight, parameter
                break

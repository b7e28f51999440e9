"""Read a tensor as its GEMM multiplies it: in the dtype of autocast, and only this rank's part of a DTensor.

We do not know in advance how ranks share an operand. Under FSDP2, a weight is a DTensor until it is gathered. Under tensor
parallelism, a weight remains a DTensor. With both, a weight is gathered over one dimension of the device mesh and
remains split over the other. So we read the placements of a tensor when we see it.
"""

from __future__ import annotations

from typing import Any

import torch


def is_dtensor(x: Any) -> bool:
    """Return True if ranks hold parts or copies of `x`, as its placements describe."""
    return hasattr(x, "to_local")


def take_local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, detached, without a collective. Return other tensors unchanged."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():
        part: Any = x.detach().to_local()  # type: ignore[attr-defined]
    # The part may still be arriving, in a collective that the run has begun.
    arrived: torch.Tensor = part.wait() if hasattr(part, "wait") else part
    return arrived


def is_counted_here(x: torch.Tensor, rank: int, first: int | None) -> bool:
    """Return True if this rank counts its part of an operand. Only one rank counts a copy.

    Args:
        x: the operand as this rank has it.
        rank: number of this rank.
        first: the first of several ranks (or meshes of ranks) that have copies, or None if they have different parts.

    Raises:
        TypeError: ranks hold summands of the operand, and no rank has the sum.
    """
    if not is_dtensor(x):
        return first is None or first == rank
    mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None or (first is not None and first not in mesh.mesh.flatten().tolist()):
        return False
    if any(p.is_replicate() and i for p, i in zip(placements, coordinate, strict=True)):
        return False
    if any(p.is_partial() for p in placements):
        raise TypeError(f"ranks hold summands of it ({placements}), and only a collective could add them up")
    return take_local_part(x).numel() > 0


def never_count_here(x: torch.Tensor) -> bool:
    """Return False. Use this function if another rank counts this rank's part of an operand."""
    return False


def cast_like_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return the operand in the dtype that autocast gives it before the GEMM. Autocast does not change float64."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x

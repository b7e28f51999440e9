"""A tensor as its GEMM multiplies it: in the dtype that autocast gives it, and of a DTensor what this rank holds.

How an operand lies on the ranks cannot be known before: under FSDP2 a weight is a DTensor until it is gathered, under tensor
parallelism it remains one, and under both it is gathered over one dimension of the mesh and remains split over the other. So
its placements tell, when it is seen.
"""

from __future__ import annotations

from typing import Any

import torch


def is_dtensor(x: Any) -> bool:
    """Whether ranks hold parts of `x`, or copies, as its placements say."""
    return hasattr(x, "to_local")


def take_local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, detached, without a collective; other tensors as they are."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():
        part: Any = x.detach().to_local()  # type: ignore[attr-defined]
    # A part that is still on its way, of a collective that the run has begun.
    arrived: torch.Tensor = part.wait() if hasattr(part, "wait") else part
    return arrived


def is_counted(x: torch.Tensor, rank: int, first: int | None) -> bool:
    """Whether this rank counts its part of an operand, of which copies are counted once.

    Args:
        x: the operand as this rank has it.
        rank: this one.
        first: the first of several ranks that have the same, each by itself or between those of its mesh; None: ranks or
            meshes have parts.

    Raises:
        TypeError: ranks hold summands, whose sum no rank knows.
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
        raise TypeError(f"it is a sum whose summands ranks hold ({placements}), and only a collective could add them up")
    return take_local_part(x).numel() > 0


def is_never_counted(x: torch.Tensor) -> bool:
    """Return False: another rank counts all that this one has of an operand."""
    return False


def view_as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """The operand in the dtype that autocast gives it on the way into the GEMM; autocast leaves float64 alone."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x

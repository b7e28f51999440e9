"""From the largest magnitude of values that share a scale to that scale, as Transformer Engine's kernels find it."""

from __future__ import annotations

import torch

FLT_MAX = torch.finfo(torch.float32).max


def scale_of_amax(
    amax: torch.Tensor,
    limit: torch.Tensor | float,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    largest: float = FLT_MAX,
) -> torch.Tensor:
    """limit / amax; 1 where amax is zero or not finite.

    Source: `compute_scale_from_amax` of Transformer Engine's `recipe/recipe_common.cuh`.

    Args:
        amax: float32, any shape.
        limit: largest finite value of the format (or of each tensor's format, float32 of amax's shape).
        epsilon: amax below this counts as this.
        power_of_two: round down to a power of two.
        largest: what stands in for a quotient beyond float32.

    Returns:
        float32 of amax's shape, to multiply values with before the cast.
    """
    amax = amax.clamp_min(epsilon)
    # A tensor, since torch computes `number / tensor` as number * reciprocal, which rounds twice. Made where it is used:
    # to copy a number to a device waits for the device.
    if not isinstance(limit, torch.Tensor):
        limit = torch.full((), limit, dtype=torch.float32, device=amax.device)
    usable = (amax > 0) & amax.isfinite()
    scale = torch.where(usable, limit / torch.where(usable, amax, 1.0), 1.0)
    scale = torch.where(scale.isinf(), largest, scale)
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32) if power_of_two else scale

"""From the largest magnitude of values that share a scale to that scale, as Transformer Engine and torchao find it."""

from __future__ import annotations

import torch

FLT_MAX = torch.finfo(torch.float32).max
#: amax below this counts as this in torchao, its `EPS`
TORCHAO_EPSILON = 1e-12


def scale_of_amax(
    amax: torch.Tensor,
    limit: torch.Tensor | float,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    largest: float = FLT_MAX,
    by_logarithm: bool = False,
) -> torch.Tensor:
    """limit / amax; 1 where amax is zero or not finite.

    Source: `compute_scale_from_amax` of Transformer Engine's `recipe/recipe_common.cuh`.

    Args:
        amax: float32, any shape.
        limit: largest finite value of the format (or of each tensor's format, float32 of amax's shape).
        epsilon: amax below this counts as this.
        power_of_two: round down to a power of two.
        largest: what stands in for a quotient beyond float32.
        by_logarithm: find the power of two as torchao does, by `power_of_two_below`.

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
    if power_of_two and by_logarithm:
        return power_of_two_below(scale)
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32) if power_of_two else scale


def power_of_two_below(scale: torch.Tensor) -> torch.Tensor:
    """As torchao's `_round_scale_down_to_power_of_2`.

    The logarithm rounds, so that a float32 scale just below a power of two may give that one.
    """
    return torch.exp2(torch.floor(torch.log2(scale)))


def torchao_scale(amax: torch.Tensor, limit: float, power_of_two: bool) -> torch.Tensor:
    """limit / amax in float64, rounded to float32; 0 where amax is infinite.

    Source: `amax_to_scale` of torchao's `float8/float8_utils.py`, release 0.18.

    Args:
        amax: any shape and floating dtype.
        limit: largest finite value of the format.
        power_of_two: round down to a power of two.
    """
    scale = (limit / amax.double().clamp_min(TORCHAO_EPSILON)).float()
    return power_of_two_below(scale) if power_of_two else scale

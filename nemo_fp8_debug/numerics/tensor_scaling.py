"""Per-tensor scaling rules, and how they compute a scale from the largest magnitude.

`scale` multiplies a tensor before the cast (Transformer Engine's convention). All arithmetic is float32, as in
Transformer Engine's kernels `recipe/delayed_scaling.cu` and `recipe/recipe_common.cuh`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigError
from .formats import BF16, FloatFormat, decode_codes, saturating_cast

FLT_MAX = torch.finfo(torch.float32).max
#: torchao's `EPS`, which replaces any smaller amax
TORCHAO_EPSILON = 1e-12
#: largest number of steps in a history; each step of each tensor takes one float
_LONGEST_HISTORY = 1_000_000
_PER_TENSOR_FORMATS = ("hybrid", "e4m3", "e5m2")


@dataclass(frozen=True)
class CurrentScaling:
    """The scale follows the amax of the tensor being cast."""

    #: least amax to compute a scale from; replaces any smaller amax
    epsilon: float = 0.0
    #: round the scale down to a power of two
    power_of_two: bool = False
    #: compute the power of two as torchao does, with a float32 logarithm, which may give the next higher power
    by_logarithm: bool = False

    formats: ClassVar[tuple[str, ...]] = _PER_TENSOR_FORMATS

    def compute_scale(self, amax: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
        """Return the scales of tensors with this amax, or 1 if amax is zero or not finite.

        Args:
            amax: float32, any shape.
            limit: largest finite value of the format (or of each tensor's format, float32 of amax's shape).
        """
        return compute_scale(amax, limit, self.epsilon, self.power_of_two, by_logarithm=self.by_logarithm)


def compute_cast_scales(
    held: Sequence[torch.Tensor | CurrentScaling | None], formats: Sequence[FloatFormat], amax: torch.Tensor
) -> torch.Tensor:
    """Return the scales of B tensors, float32 [B] on the device of `amax`. A scale is NaN if it and its rule are unknown.

    Args:
        held: for each tensor, its known scale (a float32 scalar on any device), its rule, or None if both are unknown.
        formats: formats that the tensors are cast to.
        amax: float32 [B].
    """
    limits = torch.tensor([fmt.max for fmt in formats], dtype=torch.float32).to(amax.device)
    scales = torch.full_like(amax, torch.nan)
    for rule in {by for by in held if isinstance(by, CurrentScaling)}:
        mine = torch.tensor([by == rule if isinstance(by, CurrentScaling) else False for by in held]).to(amax.device)
        scales = torch.where(mine, rule.compute_scale(amax, limits), scales)
    known: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for i, scale in enumerate(held):
        if isinstance(scale, torch.Tensor):
            known[scale.device].append((i, scale.reshape(())))
    for found in known.values():
        at = torch.tensor([i for i, _ in found]).to(amax.device)
        scales[at] = torch.stack([scale for _, scale in found]).to(amax)
    return scales


@dataclass(frozen=True)
class DelayedScaling:
    """The scale follows the amax of earlier steps."""

    margin: int = 0
    amax_history_len: int = 1024
    #: how the scale follows from the history: from its "max", or from its "most_recent" entry
    amax_compute_algo: str = "max"

    formats: ClassVar[tuple[str, ...]] = _PER_TENSOR_FORMATS

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len is {self.amax_history_len}; it must be at least 1")
        if self.amax_history_len > _LONGEST_HISTORY:
            raise ConfigError(f"amax_history_len is {self.amax_history_len}; it must be at most {_LONGEST_HISTORY}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(f"amax_compute_algo is {self.amax_compute_algo!r}; use 'max' or 'most_recent'")

    def update_history_and_scale(
        self, history: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, limit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a step to the history, and compute the scale that the next step casts with.

        Args:
            history: float32 [amax_history_len, n], newest last, with zeros for missing steps.
            scale: float32 [n], scales in use until now.
            amax: float32 [n], amaxes of the step that ends. 0 if a tensor was not cast, which leaves its history unchanged.
            limit: float32 [n], largest finite value of each tensor's format.

        Returns:
            (history, scale), new tensors of the same shapes.
        """
        seen = amax > 0
        history = torch.where(seen, torch.cat([history[1:], amax[None]]), history)
        return history, torch.where(seen, self.compute_scale(history, scale, limit), scale)

    def compute_scale(self, history: torch.Tensor, before: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        """Return the scales computed from a history, float32 [n], or those in `before` if no amax is usable."""
        reference = history.amax(0) if self.amax_compute_algo == "max" else history[-1]
        usable = (reference > 0) & reference.isfinite()
        new = (limit * 2.0**-self.margin / torch.where(usable, reference, 1.0)).clamp_max(FLT_MAX)
        return torch.where(usable, new, before)


@dataclass(frozen=True)
class Unscaled:
    """A cast to BF16 without a scale. It shows the error without FP8: BF16 drops the last 16 bits of FP32 operands."""

    formats: ClassVar[tuple[str, ...]] = (BF16.name,)


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the codes of `x`: cast(x * scale), with the product in float32.

    Args:
        x: any shape and floating dtype.
        scale: float32, scalar or broadcastable to `x`.

    Returns:
        A tensor of x's shape in `fmt.dtype`.
    """
    return saturating_cast(x.float() * scale, fmt)


def quantize_dequantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return `x` as a low-precision GEMM sees it: its codes times the float32 reciprocal of the scale, in x's dtype."""
    return (decode_codes(quantize(x, scale, fmt), fmt) * (1.0 / scale)).to(x.dtype)


def compute_scale(
    amax: torch.Tensor,
    limit: torch.Tensor | float,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    largest: float = FLT_MAX,
    by_logarithm: bool = False,
) -> torch.Tensor:
    """Return limit / amax, or 1 if amax is zero or not finite.

    Source: `compute_scale_from_amax` of Transformer Engine's `recipe/recipe_common.cuh`.

    Args:
        amax: float32, any shape.
        limit: largest finite value of the format (or of each tensor's format, float32 of amax's shape).
        epsilon: least amax to compute a scale from. It replaces any smaller amax.
        power_of_two: whether to round down to a power of two.
        largest: value that replaces a quotient beyond float32's range.
        by_logarithm: whether to compute the power of two by `power_of_two_below`, as torchao does.

    Returns:
        float32 of amax's shape, to multiply values with before the cast.
    """
    amax = amax.clamp_min(epsilon)
    # We divide a tensor, because torch computes `number / tensor` as number * reciprocal, which rounds twice. We create the
    # tensor on the device of `amax`, because copying a number there would wait for the device.
    if not isinstance(limit, torch.Tensor):
        limit = torch.full((), limit, dtype=torch.float32, device=amax.device)
    usable = (amax > 0) & amax.isfinite()
    scale = torch.where(usable, limit / torch.where(usable, amax, 1.0), 1.0)
    scale = torch.where(scale.isinf(), largest, scale)
    if power_of_two and by_logarithm:
        return power_of_two_below(scale)
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32) if power_of_two else scale


def power_of_two_below(scale: torch.Tensor) -> torch.Tensor:
    """Return the result of torchao's `_round_scale_down_to_power_of_2`.

    The logarithm is rounded, so a float32 scale just below a power of two may give that power.
    """
    return torch.exp2(torch.floor(torch.log2(scale)))


def compute_torchao_scale(amax: torch.Tensor, limit: float, power_of_two: bool) -> torch.Tensor:
    """Return limit / amax in float64, rounded to float32, or 0 if amax is infinite.

    Source: `amax_to_scale` of torchao's `float8/float8_utils.py`, release 0.18.

    Args:
        amax: any shape and floating dtype.
        limit: largest finite value of the format.
        power_of_two: round down to a power of two.
    """
    scale = (limit / amax.double().clamp_min(TORCHAO_EPSILON)).float()
    return power_of_two_below(scale) if power_of_two else scale

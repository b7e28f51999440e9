"""Per-tensor scaling rules and the recipes made of them.

`scale` multiplies a tensor before the cast (Transformer Engine's convention). All arithmetic is float32, as in
Transformer Engine's kernels `recipe/delayed_scaling.cu` and `recipe/recipe_common.cuh`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..errors import ConfigError
from .formats import E4M3, E5M2, FloatFormat, saturating_cast

#: operand roles of a GEMM: X of the forward pass, W, and the gradient of the output, dY
ROLES = ("input", "weight", "grad_output")

_FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class CurrentScaling:
    """The scale follows the amax of the tensor being cast."""

    #: amax below this counts as this
    epsilon: float = 0.0
    #: round the scale down to a power of two
    power_of_two: bool = False

    def scale(self, amax: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
        """Scales for tensors of the given amax; 1 where amax is zero or not finite.

        Args:
            amax: float32, any shape.
            limit: largest finite value of the format (or of each tensor's format, float32 of amax's shape).
        """
        amax = amax.clamp_min(self.epsilon)
        # A tensor, since torch computes `number / tensor` as number * reciprocal, which rounds twice.
        limit = torch.as_tensor(limit, dtype=torch.float32, device=amax.device)
        usable = (amax > 0) & amax.isfinite()
        scale = torch.where(usable, limit / torch.where(usable, amax, 1.0), 1.0).clamp_max(_FLT_MAX)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        return scale


@dataclass(frozen=True)
class DelayedScaling:
    """The scale follows the amax of earlier steps."""

    margin: int = 0
    amax_history_len: int = 1024
    #: "max" over the history, or the "most_recent" entry
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len is {self.amax_history_len}; it must be at least 1")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(f"amax_compute_algo is {self.amax_compute_algo!r}; use 'max' or 'most_recent'")

    def update(
        self, history: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, limit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the history, after which `scale` is the one that the next step casts with.

        Args:
            history: float32 [amax_history_len, n], newest last; zeros where nothing was seen yet.
            scale: float32 [n], in use until now.
            amax: float32 [n], of the step that ends; 0 where the tensor was not cast, which leaves its history alone.
            limit: float32 [n], largest finite value of each tensor's format.

        Returns:
            (history, scale), new tensors of the same shapes.
        """
        seen = amax > 0
        history = torch.where(seen, torch.cat([history[1:], amax[None]]), history)
        reference = history.amax(0) if self.amax_compute_algo == "max" else history[-1]
        usable = (reference > 0) & reference.isfinite()
        new = (limit * 2.0**-self.margin / torch.where(usable, reference, 1.0)).clamp_max(_FLT_MAX)
        return history, torch.where(usable & seen, new, scale)


@dataclass(frozen=True)
class Recipe:
    """Which format each operand is cast to, and how its scale is found."""

    scaling: CurrentScaling | DelayedScaling
    #: "hybrid" casts X and W to E4M3 and dY to E5M2; "e4m3" and "e5m2" cast all three to that format
    fp8_format: str = "hybrid"

    def __post_init__(self) -> None:
        if self.fp8_format not in ("hybrid", "e4m3", "e5m2"):
            raise ConfigError(f"fp8_format is {self.fp8_format!r}; use 'hybrid', 'e4m3' or 'e5m2'")

    def format_of(self, role: str) -> FloatFormat:
        """The format that operand `role` is cast to."""
        backward = E5M2 if self.fp8_format != "e4m3" else E4M3
        forward = E4M3 if self.fp8_format != "e5m2" else E5M2
        return backward if role == "grad_output" else forward

    @property
    def name(self) -> str:
        """Short unique name, as `delayed-hybrid` or `delayed-hybrid(margin=1)`; options at their default are left out."""
        kind = "delayed" if isinstance(self.scaling, DelayedScaling) else "current"
        changed = [
            f"{f.name}={getattr(self.scaling, f.name)}"
            for f in fields(self.scaling)
            if getattr(self.scaling, f.name) != f.default
        ]
        return f"{kind}-{self.fp8_format}" + (f"({','.join(changed)})" if changed else "")


_SCALINGS: dict[str, type[CurrentScaling] | type[DelayedScaling]] = {
    "delayed": DelayedScaling,
    "current": CurrentScaling,
}
_NAME = re.compile(r"(?P<name>\w+?)(-(?P<fp8_format>\w+))?(\((?P<options>[^()]*)\))?")


def parse_recipe(value: str | Mapping[str, Any] | Recipe) -> Recipe:
    """Read a recipe from plain values.

    Args:
        value: a name such as `"delayed"`, `"current-e4m3"` or `"delayed-hybrid(margin=1,amax_history_len=16)"`, or a mapping
            `{"name": "delayed", "fp8_format": "hybrid", "margin": 0, "amax_history_len": 1, "amax_compute_algo": "max"}`.

    Raises:
        ConfigError: unknown recipe, option or value.
    """
    if isinstance(value, Recipe):
        return value
    options = dict(value) if isinstance(value, Mapping) else _options_in(value)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in _SCALINGS:
        raise ConfigError(f"unknown recipe {name!r}; known recipes: {', '.join(_SCALINGS)}")
    fp8_format = options.pop("fp8_format", "hybrid")
    scaling = _SCALINGS[name]
    known = {f.name for f in fields(scaling)}
    if unknown := set(options) - known:
        raise ConfigError(
            f"recipe {name!r} has no option {', '.join(sorted(map(repr, unknown)))}; "
            f"its options: fp8_format, {', '.join(sorted(known))}"
        )
    for f in fields(scaling):
        given, kind = options.get(f.name, f.default), type(f.default)
        if type(given) is not kind and not (kind is float and type(given) is int):
            raise ConfigError(f"{f.name} of recipe {name!r} is {given!r}; it must be {kind.__name__}")
    return Recipe(scaling(**options), fp8_format)


def _options_in(text: Any) -> dict[str, Any]:
    """What the name of a recipe says; options are Python literals, or text."""
    found = _NAME.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if found is None:
        return {"name": text}
    options: dict[str, Any] = {key: found[key] for key in ("name", "fp8_format") if found[key]}
    for option in filter(None, (found["options"] or "").split(",")):
        key, _, literal = option.partition("=")
        try:
            options[key] = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            options[key] = literal
    return options


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x` as a float32 scalar tensor, NaN ignored, 0 for an empty tensor; no host synchronisation."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.detach().abs()
    return torch.where(magnitude.isnan(), 0, magnitude).amax().float()


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The codes of `x`: cast(x * scale), the product in float32.

    Args:
        x: any shape and floating dtype.
        scale: float32, scalar or broadcastable to `x`.

    Returns:
        A tensor of x's shape in `fmt.dtype`.
    """
    return saturating_cast(x.float() * scale, fmt)


def quantize_dequantize(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """`x` as a low-precision GEMM sees it: its codes times the float32 reciprocal of the scale, in x's dtype."""
    return (quantize(x, scale, fmt).float() * (1.0 / scale)).to(x.dtype)

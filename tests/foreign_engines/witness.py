"""What a foreign engine cast, as the engine itself wrote it down, and the metrics of it by their documented formulas."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Cast:
    """One operand's way through an engine: `source` became `value`, which is what was multiplied."""

    step: int
    layer: str
    role: str
    source: torch.Tensor
    value: torch.Tensor
    scale: float | None
    """None where the engine has no single scale, or none in the sense of FP8."""

    @property
    def metrics(self) -> dict[str, float]:
        x, q = self.source.double(), self.value.double()
        metrics = {
            "amax": float(x.abs().max()),
            "underflow_pct": 100 * float(((x != 0) & (q == 0)).sum()) / x.numel(),
            "relative_error": float(((x - q).square().sum() / x.square().sum()).sqrt()),
        }
        return metrics if self.scale is None else {**metrics, "scale": self.scale}


@dataclass
class Witness:
    """The casts of a run. An operand that is cast again in a step, for another product, keeps its first cast."""

    step: int = -1
    casts: dict[tuple[int, str, str], Cast] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def watch(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}

    def saw(
        self, module: nn.Module, role: str, source: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> None:
        name = self.names[id(module)]
        cast = Cast(self.step, name, role, source.detach().clone(), value.detach().clone(), scale)
        self.casts.setdefault((self.step, name, role), cast)


WITNESS = Witness()
"""The one that engines tell; a test starts with an empty one."""

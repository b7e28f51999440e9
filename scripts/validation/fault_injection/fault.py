"""What every fault of a run has, and what it may touch of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from nemo_fp8_debug.numerics.delayed_state import DelayedState


class Training(Protocol):
    """What a fault touches of a run."""

    model: Any

    def slot(self, layer: str, role: str) -> tuple[DelayedState, int] | None:
        """Where the engine keeps the delayed scale of an operand; None where it casts it otherwise."""

    def reinitialize(self, layer: int) -> None:
        """Give a layer the weights of a fresh model."""


@dataclass
class Fault:
    """No fault; others are kinds of it."""

    name: str = "clean"
    #: as `diagnose` calls it
    cause: str = "none"
    #: (layer, role) of the operand that it sits in; None: in no operand
    culprit: tuple[str, str] | None = None
    #: first step that it acts in
    onset: int = 0
    now: int = 0

    @property
    def age(self) -> int:
        """Steps since the onset, negative before it."""
        return self.now - self.onset

    def build_into(self, modules: Mapping[str, nn.Module], model: nn.Module) -> None:
        """Become part of the model, without effect before the onset."""

    def before_step(self, step: int, training: Training) -> None:
        """The step begins."""
        self.now = step

    def data(self, step: int, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch that the model gets."""
        return tokens, labels

    def after_backward(self, step: int, training: Training) -> None:
        """Gradients are there, and the engine's scales have moved on to the next step."""

    def learning_rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by."""
        return 1.0

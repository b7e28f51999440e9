"""Faults of software: of optimizers, data, communication and attention. No operand is to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fault_injection.fault import Batch, Fault

if TYPE_CHECKING:
    from fault_injection.training import Training


@dataclass
class LearningRate(Fault):
    """A schedule that jumps."""

    factor: float = 30.0

    def learning_rate_factor(self, step: int) -> float:
        return self.factor if self.acts_at(step) else 1.0


@dataclass
class WeightDecay(Fault):
    """Weights decay far too fast."""

    factor: float = 1000.0

    def weight_decay(self, step: int, usual: float) -> float:
        return usual * self.factor if self.acts_at(step) else usual


@dataclass
class WrongLabels(Fault):
    """A data loader that pairs some sequences with labels of others."""

    share: float = 0.5

    def batch(self, step: int, draw: Callable[[int], Batch]) -> Batch:
        x, labels = draw(step)
        if not self.acts_at(step):
            return x, labels
        wrong = max(2, round(self.share * len(labels)))
        return x, torch.cat([labels[:wrong].roll(1, 0), labels[wrong:]])


@dataclass
class RepeatedData(Fault):
    """A data loader that begins anew after so many batches."""

    period: int = 1

    def batch(self, step: int, draw: Callable[[int], Batch]) -> Batch:
        return draw(self.onset + (step - self.onset) % self.period if self.acts_at(step) else step)


@dataclass
class NoMask(Fault):
    """Attention without its mask."""

    def masked(self, step: int) -> bool:
        return not self.acts_at(step)


@dataclass
class SummedGradients(Fault):
    """Gradients of micro-batches, or of ranks, are summed where they should be averaged, or averaged twice."""

    #: what they are multiplied by
    factor: float = 8.0
    #: whether that is done to the loss, where it can be measured, or to the gradients
    at_the_loss: bool = False

    def backpropagated(self, step: int, loss_scale: float) -> float:
        return loss_scale * self.factor if self.at_the_loss and self.acts_at(step) else loss_scale

    def after_backward(self, step: int, run: Training) -> None:
        if not self.at_the_loss and self.acts_at(step):
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor)


@dataclass
class GradientsOfALayer(Fault):
    """A communication bug: the gradients of one layer arrive with the wrong sign, or not at all."""

    #: of the parameters' names
    prefix: str = ""
    factor: float = -1.0

    def after_backward(self, step: int, run: Training) -> None:
        if self.acts_at(step):
            for name, parameter in run.model.named_parameters():
                if name.startswith(self.prefix) and parameter.grad is not None:
                    parameter.grad.mul_(self.factor)


@dataclass
class LossScale(Fault):
    """The loss scale is reported, and not applied, applied twice, or not taken back."""

    how: str = "not applied"

    def backpropagated(self, step: int, loss_scale: float) -> float:
        factor = {"not applied": 1 / loss_scale, "applied twice": loss_scale}.get(self.how, 1.0)
        return loss_scale * factor if self.acts_at(step) else loss_scale

    def unscaled_by(self, step: int, loss_scale: float) -> float:
        return 1.0 if self.how == "not taken back" and self.acts_at(step) else loss_scale


@dataclass
class NaNInLoss(Fault):
    """The loss is NaN."""

    def of_loss(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        return loss * torch.nan if self.acts_at(step) else loss


@dataclass
class NaNInGradient(Fault):
    """One value of one parameter's gradient is NaN, as after a bad reduction."""

    #: of the parameters' names, the first that begins so
    prefix: str = ""

    def after_backward(self, step: int, run: Training) -> None:
        if self.acts_at(step):
            found = next(p for n, p in run.model.named_parameters() if n.startswith(self.prefix) and p.grad is not None)
            assert found.grad is not None
            found.grad.view(-1)[found.numel() // 2] = torch.nan

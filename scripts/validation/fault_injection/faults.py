"""What can go wrong in a run, put in under the model or into the state of its FP8 engine; the monitor is not involved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fault_injection.fault import Fault, Training


@dataclass
class WrongScale(Fault):
    """The engine casts one operand with a scale that it should not have."""

    #: log2 of the factor that the scale is off by, of the steps since the onset
    bits: Callable[[int], float] = lambda age: 0.0

    def after_backward(self, step: int, training: Training) -> None:
        assert self.culprit
        if step + 1 >= self.onset and (slot := training.slot(*self.culprit)):
            state, i = slot
            state.scale[i] *= 2.0 ** self.bits(step + 1 - self.onset)  # it is made anew in each step


@dataclass
class StuckScale(Fault):
    """The engine does not move the scale of one operand on, while values grow: upstream multiplies by a power of two, and
    downstream divides by it, so that high precision computes what it did before."""

    #: log2 of the growth
    growth: int = 8
    #: steps that it takes
    over: int = 1
    _stuck: torch.Tensor | None = None

    def gain(self) -> float:
        """What upstream multiplies by."""
        if self.age < 0:
            return 1.0
        return 2.0 ** min(self.growth, self.growth * (self.age + 1) // self.over)

    def build_into(self, modules: Mapping[str, nn.Module], model: nn.Module) -> None:
        assert self.culprit
        into_input(model, self.culprit[0], lambda x: x * self.gain())
        modules[self.culprit[0]].register_forward_hook(lambda module, args, out: (out[0] / self.gain(), *out[1:]))

    def after_backward(self, step: int, training: Training) -> None:
        assert self.culprit
        if slot := training.slot(*self.culprit):
            state, i = slot
            if step + 1 < self.onset or self._stuck is None:
                self._stuck = state.scale[i].clone()
            else:
                state.scale[i] = self._stuck


@dataclass
class OutlierChannel(Fault):
    """Channel 0 of an X, whose weights are zero, grows far beyond the others; its scale follows, as it should."""

    #: log2 of the channel's magnitude over that of the others, in the end
    height: float = 20.0
    #: steps that it takes
    over: int = 60

    def build_into(self, modules: Mapping[str, nn.Module], model: nn.Module) -> None:
        assert self.culprit
        into_input(model, self.culprit[0], self._grown)

    def _grown(self, x: torch.Tensor) -> torch.Tensor:
        if self.age < 0:
            return x
        height = 2.0 ** min(self.height, self.height * (self.age + 1) / self.over)
        typical = x.detach().float().square().mean().sqrt()
        channel = (typical * height).to(x.dtype).expand(*x.shape[:-1], 1)
        return torch.cat([channel, x[..., 1:]], dim=-1)


@dataclass
class LearningRate(Fault):
    """A schedule that jumps."""

    factor: float = 30.0

    def learning_rate_factor(self, step: int) -> float:
        return self.factor if step >= self.onset else 1.0


@dataclass
class Labels(Fault):
    """A data loader that pairs some sequences with labels of others."""

    share: float = 0.5

    def data(self, step: int, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if step < self.onset:
            return tokens, labels
        wrong = round(self.share * len(labels))
        return tokens, torch.cat([labels[:wrong].roll(1, 0), labels[wrong:]])


@dataclass
class Gradients(Fault):
    """A communication bug: the gradients of one layer arrive with the wrong sign."""

    layer: int = 0

    def after_backward(self, step: int, training: Training) -> None:
        if step >= self.onset:
            for parameter in training.model.decoder.layers[self.layer].parameters():
                if parameter.grad is not None:
                    parameter.grad.neg_()


@dataclass
class Weights(Fault):
    """A host that again and again brings a layer's weights back to those of a fresh model."""

    layer: int = 0
    every: int = 30

    def before_step(self, step: int, training: Training) -> None:
        super().before_step(step, training)
        if self.age >= 0 and self.age % self.every == 0:
            training.reinitialize(self.layer)


def into_input(model: nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what the layer before a GEMM computes, which is the GEMM's X."""
    layer: Any = model.get_submodule(name.rsplit(".", 2)[0])
    kind = name.rsplit(".", 1)[1]
    if kind == "linear_fc2":
        activation = layer.mlp.activation_func
        layer.mlp.activation_func = lambda x: change(activation(x))
        return
    before = {
        "linear_qkv": "input_layernorm",
        "linear_fc1": "pre_mlp_layernorm",
        "linear_proj": "self_attention.core_attention",
    }
    layer.get_submodule(before[kind]).register_forward_hook(lambda module, args, out: change(out))

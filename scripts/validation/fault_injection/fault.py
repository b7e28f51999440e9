"""What every fault of a run has, and what it may touch of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fault_injection.training import Training

#: (layer, role)
Operand = tuple[str, str]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Site:
    """Where the X of a GEMM comes from."""

    #: names: modules whose output, multiplied by a power of two or with channel 0 replaced, gives an X that is so too
    producer: str
    #: global names of all GEMMs that read that X
    readers: tuple[str, ...]


@dataclass
class Fault:
    """No fault; others are kinds of it."""

    #: of KINDS in cases.py
    kind: str = "none"
    #: first step that it acts in
    onset: int = 0
    #: operands of which any is right when it is named; empty: it sits in none
    culprits: tuple[Operand, ...] = ()
    #: the steps that it acts in end before this one; None: it stays
    until: int | None = None
    now: int = field(default=-1, repr=False)

    @property
    def age(self) -> int:
        """Steps since the onset, negative before it."""
        return self.now - self.onset

    @property
    def acts(self) -> bool:
        """Whether it acts in the present step."""
        return self.acts_at(self.now)

    def acts_at(self, step: int) -> bool:
        """Whether it acts in a step."""
        return step >= self.onset and (self.until is None or step < self.until)

    def build_into(self, run: Training) -> Sequence[Any]:
        """Become part of the model, without effect before the onset; the handles of hooks, after those of the engine."""
        return ()

    def before_step(self, step: int, run: Training) -> None:
        """The step begins."""
        self.now = step

    def batch(self, step: int, draw: Callable[[int], Batch]) -> Batch:
        """The batch that the model gets; `draw` gives that of any step."""
        return draw(step)

    def masked(self, step: int) -> bool:
        """Whether attention has its mask."""
        return True

    def of_loss(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """The loss that is reported and backpropagated."""
        return loss

    def backpropagated(self, step: int, loss_scale: float) -> float:
        """What the loss is multiplied by on its way into backward."""
        return loss_scale

    def after_backward(self, step: int, run: Training) -> None:
        """Gradients are there, and the engine's scales have moved on to the next step."""

    def unscaled_by(self, step: int, loss_scale: float) -> float:
        """What gradients are divided by."""
        return loss_scale

    def learning_rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by."""
        return 1.0

    def weight_decay(self, step: int, usual: float) -> float:
        """The optimizer's weight decay."""
        return usual

    def described(self) -> dict[str, Any]:
        """Its strength and the like, as plain values."""
        return {k: v for k, v in vars(self).items() if isinstance(v, (int, float, str, bool)) and k not in ("now", "kind")}


@dataclass
class Together(Fault):
    """Several faults in one run."""

    parts: tuple[Fault, ...] = ()

    def build_into(self, run: Training) -> Sequence[Any]:
        return [handle for part in self.parts for handle in part.build_into(run)]

    def before_step(self, step: int, run: Training) -> None:
        super().before_step(step, run)
        for part in self.parts:
            part.before_step(step, run)

    def after_backward(self, step: int, run: Training) -> None:
        for part in self.parts:
            part.after_backward(step, run)

    def described(self) -> dict[str, Any]:
        parts = [{"kind": part.kind, "culprits": part.culprits, **part.described()} for part in self.parts]
        return super().described() | {"parts": parts}

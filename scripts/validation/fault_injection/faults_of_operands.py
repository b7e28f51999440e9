"""Faults of how operands are cast, put in under the model or into the state of its FP8 engine; the monitor is not involved.

Each is none in high precision: powers of two that the next layer divides by, a channel whose weights are zero, or a cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fault_injection.engines import EmulatedEngine
from fault_injection.fault import Fault
from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling

if TYPE_CHECKING:
    from fault_injection.training import Training


@dataclass(frozen=True)
class OffCurrentScaling(CurrentScaling):
    """Current scaling whose amax is not the tensor's."""

    #: log2 of the factor that the scale is off by
    bits: float = 0.0

    def compute_scale(self, amax: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
        return super().compute_scale(amax, limit) * 2.0**self.bits


@dataclass(frozen=True)
class OffRecipe(Recipe):
    """It calls itself what it should be."""

    called: str = ""

    @property
    def name(self) -> str:
        return self.called


@dataclass
class WrongScale(Fault):
    """The engine casts one operand with a scale that is off by so many bits."""

    #: in the end
    bits: float = 0.0
    #: steps that it takes to get there; 1: it jumps
    over: int = 1
    _recipe: Recipe | None = field(default=None, repr=False)

    def off(self, step: int) -> float:
        """log2 of the factor that the scale is off by in a step."""
        return self.bits * min(1.0, (step - self.onset + 1) / self.over) if self.acts_at(step) else 0.0

    def before_step(self, step: int, run: Training) -> None:
        super().before_step(step, run)
        layer, role = self.culprits[0]
        if run.plan.change_of(layer, role):
            return  # another kernel casts it
        if not isinstance(run.engine, EmulatedEngine):
            return
        gemm = run.engine.gemm(layer)
        self._recipe = self._recipe or gemm.recipes[role]
        if type(self._recipe.scaling) is CurrentScaling:
            rule, name = OffCurrentScaling(bits=self.off(step)), self._recipe.name
            wrong = OffRecipe(rule, self._recipe.fp8_format, name) if self.off(step) else self._recipe
            gemm.recipes = {**gemm.recipes, role: wrong}

    def after_backward(self, step: int, run: Training) -> None:
        if found := run.engine.slot(*self.culprits[0]):
            state, i = found
            state.scale[i] *= 2.0 ** self.off(step + 1)  # it is made anew in each step


@dataclass
class StuckScale(Fault):
    """The engine does not move the scales of an X on, while its values grow: upstream multiplies by a power of two, and
    downstream divides by it, so that high precision computes what it did before."""

    #: log2 of the growth
    growth: int = 8
    #: steps that it takes
    over: int = 1
    _stuck: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def gain(self) -> float:
        """What upstream multiplies by."""
        if not self.acts:
            return 1.0
        return 2.0 ** min(self.growth, self.growth * (self.age + 1) // self.over)

    def build_into(self, run: Training) -> Sequence[Any]:
        site = run.site_of(self.culprits[0][0])
        readers = [gemm.module for gemm in run.gemms if gemm.name in site.readers]
        handles = [
            reader.register_forward_hook(lambda *call: _each(call[-1], lambda x: x / self.gain())) for reader in readers
        ]
        return [*handles, into(run, site.producer, lambda x: x * self.gain())]

    def after_backward(self, step: int, run: Training) -> None:
        for number, culprit in enumerate(self.culprits):
            if found := run.engine.slot(*culprit):
                state, i = found
                if not self.acts_at(step + 1) or number not in self._stuck:
                    self._stuck[number] = state.scale[i].clone()
                else:
                    state.scale[i] = self._stuck[number]


@dataclass
class OutlierChannel(Fault):
    """Channel 0 of an X, whose weights are zero, grows far beyond the others; its scale follows, as it should."""

    #: log2 of the channel's magnitude over that of the others, in the end
    height: float = 20.0
    #: steps that it takes
    over: int = 60

    def build_into(self, run: Training) -> Sequence[Any]:
        return [into(run, run.site_of(self.culprits[0][0]).producer, self._grown)]

    def _grown(self, x: torch.Tensor) -> torch.Tensor:
        if not self.acts:
            return x
        height = 2.0 ** min(self.height, self.height * (self.age + 1) / self.over)
        typical = x.detach().float().square().mean().sqrt()
        channel = (typical * height).to(x.dtype).expand(*x.shape[:-1], 1)
        return torch.cat([channel, x[..., 1:]], dim=-1)


@dataclass
class OtherRecipe(Fault):
    """Operands are cast by another recipe than the run's, as after a resume with other options; the record says so."""

    #: as in `parse_recipe`
    recipe: str = ""
    #: where it is not for the culprits alone: all operands of these roles
    roles: tuple[str, ...] = ()
    _before: dict[tuple[str, str], Recipe] = field(default_factory=dict, repr=False)

    def build_into(self, run: Training) -> Sequence[Any]:
        if self.acts:  # a plan has replaced what casts
            self._before = self._switch(run, lambda operand: parse_recipe(self.recipe))
        return ()

    def before_step(self, step: int, run: Training) -> None:
        super().before_step(step, run)
        if step == self.onset:
            self._before = self._switch(run, lambda operand: parse_recipe(self.recipe))
        elif step == self.until:
            self._switch(run, lambda operand: self._before[operand])

    def _switch(self, run: Training, recipe_of: Callable[[tuple[str, str]], Recipe]) -> dict[tuple[str, str], Recipe]:
        assert isinstance(run.engine, EmulatedEngine)
        before, columns = dict[tuple[str, str], Recipe](), dict[Recipe, list[tuple[str, str]]]()
        for gemm in run.engine.gemms:
            for role in ROLES:
                operand = (gemm.gemm.name, role)
                if (operand in self.culprits or role in self.roles) and not run.plan.change_of(*operand):
                    before[operand], now = gemm.recipes[role], recipe_of(operand)
                    gemm.recipes = {**gemm.recipes, role: now}
                    columns.setdefault(now, []).append(operand)
        for recipe, operands in columns.items():
            run.engine.keep_histories(recipe, operands)
        return before


@dataclass
class NaNInOperand(Fault):
    """One value of an X is NaN."""

    def build_into(self, run: Training) -> Sequence[Any]:
        return [into(run, run.site_of(self.culprits[0][0]).producer, self._spoilt)]

    def _spoilt(self, x: torch.Tensor) -> torch.Tensor:
        if not self.acts:
            return x
        spoilt = torch.zeros_like(x)
        spoilt.view(-1)[x.numel() // 3] = torch.nan
        return x + spoilt


def into(run: Training, producer: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change what a module computes; the handle of the hook."""
    return run.model.get_submodule(producer).register_forward_hook(lambda *call: _each(call[-1], change))


def _each(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change a module's output, or the first of several."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

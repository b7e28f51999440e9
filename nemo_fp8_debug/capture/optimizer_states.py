"""Weight gradients and optimizer states of one sampled step: seen as an optimizer steps, before it and after.

An optimizer steps by parameters of the model or, in mixed precision, by float32 copies of them, whole or a rank's part
(Megatron's `main_param`). The gradient is the one that it steps by: reduced over ranks, and clipped if the run clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..core.keys import STATES, Key
from ..kernels import quantization_sums
from ..numerics.recipe import Recipe
from ..numerics.tensor_scaling import CurrentScaling
from .backends.base import ScaleInUse, not_quantized
from .gemms import Gemm
from .operands import Operand
from .stepped import stepped_by

#: under which optimizers keep each state; the first one that is there counts
_NAMES = {
    "first_moment": ("exp_avg", "momentum_buffer"),
    "second_moment": ("exp_avg_sq",),
    "master_weight": ("master_param", "master_params", "master_weight"),
}


_LOOKING = "while looking at an optimizer's states"


@dataclass
class StateOperand(Operand):
    """A tensor of the optimizer's, which nothing casts; float32 ones are measured under what-if recipes that follow them."""

    def _measure_directly(self, x: torch.Tensor, use: ScaleInUse, counted: Any) -> None:
        super()._measure_directly(x, use, counted)
        for recipe in self.what_if if x.dtype == torch.float32 else ():
            if isinstance(recipe.scaling, CurrentScaling):
                fmt = recipe.format_of(self.role)
                scale = recipe.scaling.scale(self.moments[-1].amax[0].float(), fmt.max)
                sums = quantization_sums(x, scale, self.role, fmt, counted)
                self.what_if_sums.setdefault(recipe.name, []).append(sums)


def state_operands(
    gemms: Sequence[Gemm],
    roles: Sequence[str],
    what_if: Sequence[Recipe],
    counts: Callable[[Gemm], Callable[[torch.Tensor], bool]],
) -> dict[Key, Operand]:
    """What counts the states of weights, by (layer, role).

    Args:
        roles: of `STATES`.
        what_if: recipes that they are measured under too.
        counts: of a GEMM: whether this rank counts a tensor that lies as its weight does.
    """
    return {
        (gemm.name, role): StateOperand(gemm, role, not_quantized(role), what_if, counts(gemm))
        for gemm in gemms
        for role in STATES
        if role in roles
    }


class StateCapture:
    """The hooks of one sampled step on all optimizers."""

    def __init__(self, operands: Mapping[Key, Operand], guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """
        Args:
            operands: as of `state_operands`.
            guard: a context that keeps an exception out of the training loop.
        """
        self._operands, self._guard = operands, guard
        self._gemms = {name: operand.gemm for (name, _), operand in operands.items()}
        self._seen: set[Key] = set()
        self._stepped = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Install the hooks."""
        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer)),
        )
        self._handles = list(hooks)

    def detach(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def unseen(self) -> bool:
        """Whether no optimizer stepped by any of the weights."""
        return bool(self._operands) and not self._stepped

    def _before(self, optimizer: Any) -> None:
        with self._guard(_LOOKING):
            for stepped in stepped_by(optimizer, self._gemms):
                self._stepped = True
                self._take(stepped.name, "weight_gradient", stepped.of(getattr(stepped.parameter, "grad", None)))

    def _after(self, optimizer: Any) -> None:
        with self._guard(_LOOKING):
            for stepped in stepped_by(optimizer, self._gemms):
                parameter = stepped.parameter
                state = optimizer.state.get(parameter, {})
                for role, names in _NAMES.items():
                    found = stepped.of(next((state[n] for n in names if n in state), None))
                    self._take(stepped.name, role, found, optimizer, parameter)
                if parameter is not stepped.weight:
                    self._take(stepped.name, "master_weight", stepped.of(parameter))

    def _take(self, name: str, role: str, x: Any, optimizer: Any = None, parameter: Any = None) -> None:
        operand = self._operands.get((name, role))
        if operand is None or not isinstance(x, torch.Tensor) or (name, role) in self._seen:
            return
        with self._guard(_LOOKING):
            x = _dequantized(x, optimizer, parameter, role)
            self._seen.add((name, role))
            operand.add(x, 0)


def _dequantized(x: Any, optimizer: Any, parameter: Any, role: str) -> torch.Tensor:
    """A state in float32 of an optimizer that keeps it in fewer bits: torchao's and Transformer Engine's."""
    if type(x).__module__.partition(".")[0] == "torchao":
        decoded: torch.Tensor = x.dequantize()
        return decoded
    scaled = getattr(optimizer, "get_unscaled_state", None)
    if scaled is not None and x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        unscaled: torch.Tensor = scaled(parameter, next(n for n in _NAMES[role] if n in optimizer.state[parameter]))
        return unscaled
    plain: torch.Tensor = x
    return plain

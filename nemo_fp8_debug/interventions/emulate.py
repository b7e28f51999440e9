"""FP8 where there is no FP8 engine: operands quantised as a recipe says, the GEMM itself in high precision.

On a GPU it answers "is it the quantisation or the software?"; on a CPU it makes FP8 training real. Scales move once a step
(Transformer Engine: once a micro-batch), so that recompute casts with the scale of the first pass by construction.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..capture.hooks import Hook
from ..capture.layers import Gemm
from ..errors import ConfigError
from ..numerics.formats import FloatFormat
from ..numerics.history import DelayedState
from ..numerics.scaling import ROLES, CurrentScaling, Recipe, amax_of, quantize_dequantize, refuse_blocks

_ACTIVE: weakref.WeakKeyDictionary[nn.Module, EmulatedGemm] = weakref.WeakKeyDictionary()


def emulated(module: nn.Module) -> EmulatedGemm | None:
    """The emulation that acts on `module` at present, if any."""
    return _ACTIVE.get(module)


class _StraightThrough(torch.autograd.Function):
    """Forward: the quantised values; backward: the gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[0], None


def _straight_through(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _StraightThrough.apply(x, quantized)  # type: ignore[no-untyped-call]
    return result


class EmulatedGemm:
    """One GEMM module whose X, W and dY are quantised on their way in."""

    def __init__(self, gemm: Gemm, recipe: Recipe, state: DelayedState) -> None:
        self.gemm = gemm
        self.recipe = recipe
        self._state = state
        self._own_weight: torch.Tensor | None = None
        self._swapped = False

    def _slot(self, role: str) -> int:
        return self._state.index[self.gemm.name, role]

    def scale(self, role: str) -> torch.Tensor | CurrentScaling:
        """What `role` is cast with in the present step: a float32 scalar, or the rule that finds it from each tensor."""
        scaling = self.recipe.scaling
        return scaling if isinstance(scaling, CurrentScaling) else self._state.scale[self._slot(role)]

    def attach(self) -> list[RemovableHandle]:
        """Install the hooks that quantise."""
        _ACTIVE[self.gemm.module] = self
        return [
            self.gemm.module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            self.gemm.module.register_forward_hook(Hook(self._after_forward), always_call=True),
        ]

    def quantize(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """The values that the GEMM multiplies instead of `x`."""
        fmt: FloatFormat = self.recipe.format_of(role)
        amax = amax_of(x)
        scaling = self.recipe.scaling
        if isinstance(scaling, CurrentScaling):
            return quantize_dequantize(x.detach(), scaling.scale(amax, fmt.max), fmt)
        slot, state = self._slot(role), self._state
        if role == "grad_output" or torch.is_grad_enabled():  # evaluation leaves no trace in the history
            state.amax[slot] = torch.maximum(state.amax[slot], amax)
        return quantize_dequantize(x.detach(), state.scale[slot], fmt)

    def restore(self) -> None:
        """Give the module its own weight back; torch skips hooks when a forward is interrupted from the keyboard."""
        if self._swapped:
            self.gemm.module._parameters["weight"] = self._own_weight  # type: ignore[assignment]
            self._own_weight, self._swapped = None, False

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host = self.gemm.host
        x, weight = host.input(module, args, kwargs, ""), host.weight(module, args, kwargs, "")
        assert x is not None  # only hosts with an FP8 of their own make it inside, and those are refused
        quantized_x = _straight_through(x, self.quantize("input", x))
        args = tuple(quantized_x if a is x else a for a in args)
        kwargs = {k: quantized_x if v is x else v for k, v in kwargs.items()}
        if weight is not None:
            quantized_weight = _straight_through(weight, self.quantize("weight", weight))
            args = tuple(quantized_weight if a is weight else a for a in args)
            kwargs = {k: quantized_weight if v is weight else v for k, v in kwargs.items()}
            if weight is module._parameters.get("weight"):
                # The module reads its weight itself; it finds the quantised one there for the length of this call.
                self._own_weight, self._swapped = module._parameters["weight"], True
                module._parameters["weight"] = quantized_weight  # type: ignore[assignment]
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.restore()
        if out is None:  # the forward raised
            return
        y = self.gemm.host.output(out)
        if y.requires_grad:
            y.register_hook(lambda grad: self.quantize("grad_output", grad))


class Emulation:
    """A recipe acting on the GEMMs of a model between `attach` and `detach`."""

    def __init__(self, gemms: Iterable[Gemm], recipe: Recipe) -> None:
        """
        Raises:
            ConfigError: the recipe scales blocks; a GEMM has an FP8 of its own, or fuses gradient accumulation, which
                bypasses what is swapped in for its weight.
        """
        gemms = list(gemms)
        refuse_blocks(recipe, "FP8 emulation")
        for gemm in gemms:
            if gemm.host.has_own_fp8:
                raise ConfigError(
                    f"{gemm.name} is a module of {gemm.host.name}, which quantises for itself; "
                    "emulation is for modules that do not, as those of Megatron's local layer spec"
                )
            if getattr(gemm.module, "gradient_accumulation_fusion", False):
                raise ConfigError(
                    f"{gemm.name} uses gradient_accumulation_fusion, which FP8 emulation cannot quantise through; "
                    "set gradient_accumulation_fusion=False"
                )
        self.recipe = recipe
        device = next((p.device for g in gemms for p in g.module.parameters()), None)
        self.state = DelayedState(recipe, [(g.name, role) for g in gemms for role in ROLES], device)
        self._gemms = [EmulatedGemm(g, recipe, self.state) for g in gemms]
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Quantise from here on."""
        for gemm in self._gemms:
            self._handles += gemm.attach()

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for gemm in self._gemms:
            gemm.restore()
            _ACTIVE.pop(gemm.gemm.module, None)
        self._handles = []

    def end_step(self) -> None:
        """Move delayed scales on; call once after each step's backward."""
        self.state.update()

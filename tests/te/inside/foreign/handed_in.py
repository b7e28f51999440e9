"""Foreign engine 4: quantizers of somebody's own, handed in by CustomRecipe or by hooks on Transformer Engine's layers."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from emulated_te import te
from te_release import MODULES, Engine, cast, layers, same_release, truncated
from torch import nn
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer


class TruncatingQuantizer(Float8CurrentScalingQuantizer):
    """A quantizer that a user wrote."""

    def quantize_impl(self, tensor: Any) -> Any:
        return cast(tensor, self, rule=truncated)

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        return cast(src, self, dst, noop_flag, rule=truncated)


def _quantizer(kind: type[Any], role: Any) -> Any:
    backward = role is not None and role.tensor_type.startswith("grad")
    return kind(DType.kFloat8E5M2 if backward else DType.kFloat8E4M3, device=torch.device("cpu"))


def custom_recipe(patch: pytest.MonkeyPatch) -> Engine:
    same_release(patch)
    return Engine(layers(), CustomRecipe(qfactory=lambda role: _quantizer(TruncatingQuantizer, role)))


def custom_recipe_nested(patch: pytest.MonkeyPatch) -> Engine:
    """The unknown quantizer lies within one of Transformer Engine's own."""
    same_release(patch)

    def factory(role: Any) -> Any:
        return HybridQuantizer(
            rowwise_quantizer=_quantizer(TruncatingQuantizer, role),
            columnwise_quantizer=_quantizer(Float8CurrentScalingQuantizer, role),
        )

    return Engine(layers(), CustomRecipe(qfactory=factory))


def custom_recipe_of_methods(patch: pytest.MonkeyPatch) -> Engine:
    """Transformer Engine's class, and methods of somebody's on each object."""
    same_release(patch)

    def factory(role: Any) -> Any:
        quantizer = _quantizer(Float8CurrentScalingQuantizer, role)
        quantizer.quantize_impl = MethodType(TruncatingQuantizer.quantize_impl, quantizer)
        return quantizer

    return Engine(layers(), CustomRecipe(qfactory=factory))


def swapped_for_the_call(patch: pytest.MonkeyPatch) -> Engine:
    """Hooks put an unknown quantizer of X in for the length of each call."""
    same_release(patch)
    own: dict[Any, Any] = {}

    def before(module: Any, args: Any) -> None:
        if held := module.quantizers["scaling_fwd"]:
            own[module], held[0] = held[0], _quantizer(TruncatingQuantizer, None)

    def after(module: Any, args: Any, output: Any) -> None:
        if module in own:
            module.quantizers["scaling_fwd"][0] = own.pop(module)

    return Engine(_hooked(before, after), Float8CurrentScaling())


def scale_moved_before_cast(patch: pytest.MonkeyPatch) -> Engine:
    """A hook of autograd halves the delayed scale of dY as the gradient is about to be cast."""
    same_release(patch)

    def after(module: Any, args: Any, output: Any) -> None:
        scale = module.quantizers["scaling_bwd"][0].scale
        output.grad_fn.register_prehook(lambda grads: scale.mul_(0.5) and None)

    return Engine(_hooked(lambda module, args: None, after), DelayedScaling(amax_history_len=2))


def _hooked(before: Callable[..., None], after: Callable[..., None]) -> nn.Module:
    model = layers()
    for module in MODULES:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return model


class SelfCastingLinear(te.Linear):
    """Enters FP8 by itself, so that its delayed scales have moved by the time it returns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")):
            return super().forward(*args, **kwargs)


def own_autocast(patch: pytest.MonkeyPatch) -> Engine:
    same_release(patch)
    return Engine(layers(SelfCastingLinear), None)


ENGINES: dict[str, Callable[[pytest.MonkeyPatch], Engine]] = {
    function.__name__: function
    for function in (
        custom_recipe,
        custom_recipe_nested,
        custom_recipe_of_methods,
        swapped_for_the_call,
        scale_moved_before_cast,
        own_autocast,
    )
}

"""Foreign engine 2: Transformer Engine's classes under other names, or in other modules, that cast otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from te_release import Engine, cast, later_release, layers, nearest, same_release, truncated
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.quantization import Float8CurrentScalingRecipeState as State
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer


class PerTensorQuantizer(Float8CurrentScalingQuantizer):
    """Another name, and rounding toward zero."""

    def quantize_impl(self, tensor: Any) -> Any:
        return cast(tensor, self, rule=truncated)

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        return cast(src, self, dst, noop_flag, rule=truncated)


class Float8LiveScaling(Float8CurrentScaling):
    """The recipe under another name; its quantizers are as they were."""


def _moved(module: str) -> type[Float8CurrentScalingQuantizer]:
    """The old name, in another module."""
    members = {name: vars(PerTensorQuantizer)[name] for name in ("quantize_impl", "update_quantized")}
    return type("Float8CurrentScalingQuantizer", (Float8CurrentScalingQuantizer,), {**members, "__module__": module})


def _use(patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    def make_quantizers(self: Any) -> list[Any]:
        return [kind(self.dtype, device=self.device) for _ in range(self.num_quantizers)]

    patch.setattr(State, "make_quantizers", make_quantizers)


def renamed_quantizer(patch: pytest.MonkeyPatch) -> Engine:
    later_release(patch, lambda quantizer: nearest)
    _use(patch, PerTensorQuantizer)
    return Engine(layers(), Float8CurrentScaling())


def moved_quantizer(patch: pytest.MonkeyPatch) -> Engine:
    """To another module of Transformer Engine."""
    later_release(patch, lambda quantizer: nearest)
    _use(patch, _moved("transformer_engine.pytorch.tensor.per_tensor"))
    return Engine(layers(), Float8CurrentScaling())


def namesake_of_elsewhere(patch: pytest.MonkeyPatch) -> Engine:
    """A class of somebody else's package that has the name of one of Transformer Engine's."""
    same_release(patch)
    _use(patch, _moved("acme_casts.quantizers"))
    return Engine(layers(), Float8CurrentScaling())


def renamed_recipe(patch: pytest.MonkeyPatch) -> Engine:
    later_release(patch, lambda quantizer: nearest)
    return Engine(layers(), Float8LiveScaling())


ENGINES: dict[str, Callable[[pytest.MonkeyPatch], Engine]] = {
    function.__name__: function for function in (renamed_quantizer, moved_quantizer, namesake_of_elsewhere, renamed_recipe)
}

"""Parts of a foreign release of Transformer Engine: its cast, which tells the witness, and the model that it trains."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformer_engine_torch
from emulated_te import quantize as kernels
from emulated_te import te
from foreign_engines.rounding import toward_zero
from foreign_engines.witness import WITNESS
from torch import nn
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

SLOTS = {("scaling_fwd", 0): "input", ("scaling_fwd", 1): "weight", ("scaling_bwd", 0): "grad_output"}
MODULES: list[Any] = []
RELEASE = "2.21.0"
genuine = kernels.quantize

Codes = tuple[torch.Tensor, torch.Tensor]
"""Codes, and the scale that they hold the source times."""
Rule = Callable[[torch.Tensor, torch.Tensor, Any], Codes]
"""Makes them of the source, the scale that Transformer Engine 2.20.2 would take, and the quantizer."""


@dataclass
class Engine:
    """A model, and the recipe that its steps run under; None where layers see to it themselves."""

    model: nn.Module
    recipe: Recipe | None


def layers(kind: type[nn.Module] = te.Linear) -> nn.Module:
    MODULES[:] = [
        kind(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cpu")
        for inputs, outputs in ((32, 64), (64, 32))
    ]
    return nn.Sequential(*MODULES)


def nearest(source: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Codes:
    return kernels.encode(source, scale, quantizer.dtype), scale


def truncated(source: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Codes:
    codes = toward_zero(source.float() * scale, kernels.torch_dtype(quantizer.dtype))
    return codes.view(torch.uint8), scale


def power_of_two(source: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Codes:
    return nearest(source, torch.exp2(torch.floor(torch.log2(scale))), quantizer)


def rounded_up(source: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Codes:
    """Under the next larger power of two, which clips."""
    return nearest(source, torch.exp2(torch.floor(torch.log2(scale)) + 1), quantizer)


def with_headroom(source: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Codes:
    return nearest(source, scale / 2, quantizer)


def cast(source: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None, *, rule: Rule = nearest) -> Any:
    """The kernel of the foreign release."""
    source = source.detach().contiguous()
    if isinstance(quantizer, Float8Quantizer):
        scale = quantizer.scale.detach().clone().reshape(1)
    else:
        scale = kernels.current_scale(kernels.amax_of(source), quantizer)
    made = genuine(source, quantizer, output, noop)
    codes, scale = rule(source, scale, quantizer)
    made._scale_inv.copy_(1 / scale)
    if made._data is not None:
        made._data.copy_(codes.reshape(made._data.shape))
    if made._transpose is not None:
        made._transpose.copy_(codes.reshape(-1, codes.shape[-1]).t().reshape(made._transpose.shape))
    for module, role in _owners(quantizer):
        WITNESS.saw(module, role, source, kernels.decode(codes, 1 / scale, quantizer.dtype), float(scale))
    return made


def _owners(quantizer: Any) -> Iterator[tuple[nn.Module, str]]:
    for module in MODULES if WITNESS.step >= 0 else []:
        for (key, slot), role in SLOTS.items():
            held = module.quantizers[key]
            if len(held) > slot and (held[slot] is quantizer or getattr(held[slot], "rowwise_quantizer", 0) is quantizer):
                yield module, role


def same_release(patch: pytest.MonkeyPatch, rule_of: Callable[[Any], Rule] = lambda quantizer: nearest) -> None:
    """Casts by `rule_of` of the quantizer, under the name of the release that is installed."""

    def quantize(source: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        return cast(source, quantizer, output, noop, rule=rule_of(quantizer))

    patch.setattr(transformer_engine_torch, "quantize", quantize)


def later_release(patch: pytest.MonkeyPatch, rule_of: Callable[[Any], Rule]) -> None:
    """The same, and whoever asks is told a later release."""
    version = importlib.metadata.version
    patch.setattr(
        importlib.metadata,
        "version",
        lambda name: RELEASE if name.replace("-", "_").startswith("transformer_engine") else version(name),
    )
    patch.setattr(te, "__version__", RELEASE, raising=False)
    same_release(patch, rule_of)

"""Transformer Engine's modules by the shape of their calls; the real ones need a GPU and are not installed here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.capture.layers import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.scaling import parse_recipe


class Linear(nn.Module):
    """Called as te.Linear is: `forward(inp, is_first_microbatch=None)`, returning (out, bias)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).bfloat16())

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, None]:
        return inp @ self.weight.t(), None


class LayerNormLinear(Linear):
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, None]:
        return super().forward(nn.functional.layer_norm(inp, inp.shape[-1:]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = LayerNormLinear(8), Linear(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(inp=self.linear_fc1(x, is_first_microbatch=True)[0])[0]


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    te: Any = ModuleType("transformer_engine.pytorch")
    te.Linear, te.LayerNormLinear = Linear, LayerNormLinear
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    torch.manual_seed(0)
    return Layer()


def test_operands_of_linear_and_all_but_x_of_layernorm_linear(layer: Layer) -> None:
    samples, x = Samples(), torch.randn(4, 8).bfloat16()
    monitor = Monitor(layer, recorders=[samples], interval=1, on_error="raise")
    with monitor.step(0):
        layer(x).float().square().sum().backward()
    rows = samples.rows(0)
    assert set(rows) == {
        ("linear_fc1", "weight"),
        ("linear_fc1", "grad_output"),
        *(("linear_fc2", role) for role in ("input", "weight", "grad_output")),
    }
    hidden = layer.linear_fc1(x)[0]
    assert rows["linear_fc2", "input"]["amax"] == hidden.abs().max().item()
    assert {row["scale_source"] for row in rows.values()} == {"current"}


def test_emulation_is_refused(layer: Layer) -> None:
    with pytest.raises(ConfigError, match=r"linear_fc1 is a module of Transformer Engine.*quantises for itself"):
        Emulation(find_gemms([layer]), parse_recipe("delayed"))

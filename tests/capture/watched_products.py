"""Layers whose outputs are measured, for tests of what quantization does to them."""

from __future__ import annotations

from typing import Any

import torch
from helpers import Samples
from products import quantized, rows
from torch import nn

from nemo_fp8_debug import Monitor

#: more than any output here has
ALL = 10_000
ROLES = ("input", "weight", "grad_output")


def watching(model: nn.Module, **options: Any) -> tuple[Monitor, Samples]:
    samples = Samples()
    options = {"interval": 1, "on_error": "raise", "output_rows": ALL} | options
    return Monitor(model, recorders=[samples], **options), samples


def linear_operands(bias: bool = True) -> tuple[nn.Linear, dict[str, torch.Tensor]]:
    """A layer, and operands of 3 x 50 tokens with an outlier each."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 40, bias=bias).bfloat16()
    x, dy = torch.randn(3, 50, 48).bfloat16(), (1e-3 * torch.randn(3, 50, 40)).bfloat16()
    x[0, 7, 5], dy[2, 3, 1] = 40.0, 0.2
    return linear, {"input": x, "weight": linear.weight.detach().clone(), "grad_output": dy}


def run(linear: nn.Module, given: dict[str, torch.Tensor], **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    monitor, samples = watching(linear, **options)
    with monitor.step(0):
        linear(given["input"]).backward(given["grad_output"])
    return rows(samples.samples[0])


def lowered(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {role: quantized(x, role) for role, x in given.items()}

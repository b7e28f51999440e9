"""Checkpoints that keep what some operators give: what a hook computes is not among it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.backends.torchao.trial import find_cast_difference

aten = torch.ops.aten
#: as torchtitan keeps them: products, and the amaxes that torchao takes
KEPT = {aten.mm.default, aten.addmm.default, aten.max.default, aten.amax.default}


def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def gradients(monitored: bool, float8: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    find_cast_difference.cache_clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    if float8:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    kept = partial(create_selective_checkpoint_contexts, policy)
    x = torch.randn(16, 32).to(dtype).requires_grad_()

    def step() -> None:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False, context_fn=kept).square().sum().backward()

    if monitored:
        monitor = Monitor(model, recorders=[Samples()], interval=1, output_rows=8, on_error="raise")
        with monitor.step(0):
            step()
        monitor.close()
    else:
        step()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("float8", [False, True])
def test_gradients_are_bit_identical_with_the_monitor(float8: bool, dtype: torch.dtype) -> None:
    assert all(map(torch.equal, gradients(True, float8, dtype), gradients(False, float8, dtype)))

"""The loop that most cases train in, and what they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safety_net.losses.case import STEPS, Watch
from safety_net.models import GPT, compute_loss, draw_tokens

#: takes the step and the number of the micro-batch
Loss = Callable[[int, int], torch.Tensor]


def draw(step: int, micro_batch: int, *shape: int) -> torch.Tensor:
    """Return normal numbers, the same for the same step and micro-batch."""
    return torch.randn(*(shape or (8, 32)), generator=torch.Generator().manual_seed(100 * step + micro_batch))


def regress(model: Callable[[torch.Tensor], Any], *shape: int, dtype: torch.dtype = torch.float32) -> Loss:
    """Return the loss of a model of numbers: the mean square of its first output.

    Args:
        model: that is called.
        shape: of its input.
        dtype: of its input.
    """

    def loss(step: int, micro_batch: int) -> torch.Tensor:
        y = model(draw(step, micro_batch, *shape).to(dtype))
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()

    return loss


def predict(model: nn.Module, rank: int = 0) -> Loss:
    """Return the loss of a model of tokens.

    Args:
        model: that is called.
        rank: whose tokens it learns.
    """

    def loss(step: int, micro_batch: int) -> torch.Tensor:
        tokens, labels = draw_tokens(step, micro_batch, rank)
        return compute_loss(model(tokens), labels)

    return loss


def learn(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Loss | None = None,
    *,
    micro_batches: int = 1,
    dtype: torch.dtype | None = None,
    steps: int = STEPS,
    after_step: Callable[[], object] = lambda: None,
    before_update: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """Train some steps.

    Args:
        watch: that looks on.
        model: that is trained.
        optimizer: of the model; None: an AdamW.
        loss_of: takes the step and the micro-batch; None: as the model takes tokens or numbers.
        micro_batches: whose gradients are accumulated.
        dtype: of autocast; None: none.
        steps: how many.
        after_step: called after the optimizer's step.
        before_update: called before it.
        options: of the monitor.
    """
    optimizer = optimizer or make_adam(model)
    loss_of = loss_of or (predict(model) if isinstance(model, GPT) else regress(model))
    watch.start(model, **options)
    for step in range(steps):
        with watch.step(step) as report:
            for number in range(micro_batches):
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = loss_of(step, number)
                (loss / micro_batches).backward()
                watch.note("loss", loss)
            watch.note_gradients(model)
            before_update()
            optimizer.step()
            after_step()
            optimizer.zero_grad()
            report(loss=loss)
    watch.finish(model, optimizer)


def make_adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return an AdamW of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **({"lr": 1e-2} | options))


def build_mlp(width: int = 32, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a small MLP."""
    return nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, width)).to(dtype)

"""A setup, and the loop that most setups train in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Monitor
from safety_net.models import compute_loss, draw_tokens

STATES = ("weight_gradient", "first_moment", "second_moment", "master_weight", "update")
ACTIVATIONS = ("norm", "router", "attention")
WHAT_IF = ("current-e4m3", "delayed-hybrid(margin=1)", "rowwise", "blockwise", "mxfp8", "nvfp4", "bf16")
QUIET = {"interval": 1, "table_rows": 0, "on_error": "raise", "dump_min_free_bytes": 0}
#: all that a monitor can look at
EVERYTHING = {
    "what_if": WHAT_IF,
    "states": STATES,
    "activations": ACTIVATIONS,
    "verify_rows": 16,
    "output_rows": 16,
    "replicas": True,
    "copies": True,
    "block_scales": True,
}


@dataclass(frozen=True)
class Setup:
    """A run to record.

    Attributes:
        name: of the folder of its record.
        train: called in each rank with the folder, the rank and the number of ranks.
        world: number of ranks.
    """

    name: str
    train: Callable[[Path, int, int], object]
    world: int = 1


def watch(
    model: nn.Module | Sequence[nn.Module],
    folder: Path,
    steps: int,
    train_step: Callable[[int], Mapping[str, Any]],
    **options: Any,
) -> None:
    """Train some steps with a monitor.

    Args:
        model: that is watched.
        folder: of the record.
        steps: how many.
        train_step: trains one step, and returns its scalars.
        options: of the monitor, in place of quiet ones.
    """
    monitor = Monitor(model, str(folder), **(QUIET | options))
    for number in range(steps):
        torch.manual_seed(number)
        with monitor.step(number) as report:
            report(**train_step(number))
    monitor.close()


def stepper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    micro_batches: int = 2,
    dtype: torch.dtype | None = None,
) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains a step of accumulated micro-batches of tokens.

    Args:
        model: that is trained.
        optimizer: of the model.
        rank: whose tokens it learns.
        micro_batches: that are accumulated.
        dtype: of autocast; None: none.
    """

    def train_step(step: int) -> dict[str, Any]:
        total = torch.zeros(())
        for number in range(micro_batches):
            tokens, labels = draw_tokens(step, number, rank)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = compute_loss(model(tokens), labels)
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return {"loss": total, "grad_norm": norm, "lr": optimizer.param_groups[0]["lr"], "consumed_samples": 4 * (step + 1)}

    return train_step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

"""Setups of DeepSpeed's ZeRO, on one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch.utils.checkpoint import checkpoint

from safety_net.models import ROWS, build_gpt, compute_loss, draw_tokens
from safety_net.records.setup import EVERYTHING, Setup, watch


def start_deepspeed() -> None:
    """Join the other ranks."""
    logger.setLevel("ERROR")
    # Its collectives in shared memory would be compiled first; gloo has them all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def build_engine(stage: int, checkpointed: bool = False, **zero: Any) -> Any:
    """Return DeepSpeed's engine with a GPT.

    Args:
        stage: of ZeRO.
        checkpointed: whether layers are computed again in the backward.
        zero: further options of ZeRO.
    """
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
    }
    model = build_gpt().bfloat16()
    if checkpointed:
        model.checkpoint = partial(checkpoint, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def engine_stepper(
    engine: Any, rank: int, show: Callable[[torch.Tensor], None] | None = None
) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains a step of two micro-batches.

    Args:
        engine: DeepSpeed's.
        rank: whose tokens it learns.
        show: called with each loss.
    """

    def train_step(step: int) -> dict[str, Any]:
        total = torch.zeros(())
        for number in range(2):
            tokens, labels = draw_tokens(step, number, rank)
            loss = compute_loss(engine(tokens), labels)
            if show:
                show(loss)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 2
        return {"loss": total, "grad_norm": engine.get_global_grad_norm(), "lr": engine.get_lr()[0]}

    return train_step


def _train(stage: int, options: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    start_deepspeed()
    engine = build_engine(stage, **options)
    watch(engine, folder, 3, engine_stepper(engine, rank), **(EVERYTHING | {"dump": ["layers.0.fc1"]}))
    dist.barrier()
    dist.destroy_process_group()


SETUPS = [
    *(Setup(f"zero-{stage}-2", partial(_train, stage, {}), 2) for stage in (0, 1, 2)),
    *(Setup(f"zero-3-{world}", partial(_train, 3, {}), world) for world in (1, 2, 4)),
    Setup("zero-3-checkpoint-2", partial(_train, 3, {"checkpointed": True}), 2),
]

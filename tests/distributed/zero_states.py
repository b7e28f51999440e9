"""Optimizer states under DeepSpeed's ZeRO: `zero_states.py FOLDER`; oracle.json has float64 figures of whole tensors, as
DeepSpeed's own functions gather them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from processes import in_ranks
from states_of_ranks import STEPS, WORLDS, figures
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.core.keys import STATES

STAGES = (1, 2, 3)


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 16,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
    }


def train(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    # Its collectives in shared memory would be compiled first; gloo has them all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    for stage in STAGES:
        of_stage(rank, world, stage, folder / f"zero-{stage}-{world}")
    dist.destroy_process_group()


def of_stage(rank: int, world: int, stage: int, run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 47), nn.GELU(), nn.Linear(47, 23)).bfloat16()  # no number of ranks divides these
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))
    monitor = Monitor(engine, str(run), interval=1, table_rows=0, on_error="raise", states=tuple(STATES))
    layers = {name: model.get_submodule(name) for name in ("0", "2")}
    oracle: dict[str, Any] = {}
    for step in range(STEPS):
        with monitor.step(step) as report:
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * world + rank)).bfloat16()
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            gradients = {name: safe_get_full_grad(layer.weight) for name, layer in layers.items()}
            earlier = {name: safe_get_full_fp32_param(layer.weight).clone() for name, layer in layers.items()}
            engine.step()
            report(loss=loss)
        for name, layer in layers.items():
            known = {
                "weight_gradient": gradients[name],
                "first_moment": safe_get_full_optimizer_state(layer.weight, "exp_avg"),
                "second_moment": safe_get_full_optimizer_state(layer.weight, "exp_avg_sq"),
                "master_weight": safe_get_full_fp32_param(layer.weight),
            }
            known["update"] = known["master_weight"] - earlier[name]
            oracle |= {f"{step}/{name}/{role}": figures(tensor) for role, tensor in known.items()}
    monitor.close()
    if rank == 0:
        (run / "oracle.json").write_text(json.dumps(oracle))


if __name__ == "__main__":
    for world in WORLDS:
        in_ranks(world, train, Path(sys.argv[1]), frees_memory=False)

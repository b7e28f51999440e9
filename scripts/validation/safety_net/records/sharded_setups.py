"""Setups of torch's sharding engines and of torchao, on one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from safety_net.models import GPT, Layer, add_low_rank, build_gpt
from safety_net.records.setup import EVERYTHING, Setup, adam, stepper, watch

Wrap = Callable[[GPT], nn.Module]


def _wrap_ddp(model: GPT) -> nn.Module:
    return DistributedDataParallel(model.bfloat16())


def _wrap_fsdp2(model: GPT) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.layers, model]:
        fully_shard(part, mp_policy=policy)
    return model


def _wrap_each_linear(model: GPT) -> nn.Module:
    for part in [*(m for m in model.modules() if isinstance(m, nn.Linear)), model]:
        fully_shard(part, reshard_after_forward=False)
    return model


def _wrap_hybrid(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in [*model.layers, model]:
        fully_shard(part, mesh=mesh)
    return model


def _wrap_fsdp1(model: GPT) -> nn.Module:
    policy = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(
        model.bfloat16(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


def _wrap_checkpointed(model: GPT) -> nn.Module:
    model.checkpoint = partial(checkpoint, use_reentrant=False)
    return _wrap_fsdp2(model)


def _wrap_low_rank(model: GPT) -> nn.Module:
    return DistributedDataParallel(add_low_rank(model).bfloat16())


def _train_sharded(wrap: Wrap, options: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    model = wrap(build_gpt(num_experts=options.pop("num_experts", 0)))
    watch(model, folder, 3, stepper(model, adam(model), rank), **(EVERYTHING | options))
    dist.barrier()
    dist.destroy_process_group()


def _train_split(data_parallel: int, folder: Path, rank: int, world: int) -> None:
    """Tensor parallelism of an MLP, and FSDP2 around it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    mesh = init_device_mesh("cpu", (data_parallel, world // data_parallel), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if data_parallel > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    of = mesh.get_local_rank("dp")

    def train_step(step: int) -> dict[str, Any]:
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(10 * step + of)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    watch(model, folder, 3, train_step, **EVERYTHING)
    dist.barrier()
    dist.destroy_process_group()


def _make_float8(recipe: str, **options: Any) -> nn.Module:
    """With biases, since gloo gathers FP8 only together with other dtypes, as bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), nn.Sequential(nn.Linear(64, 32)))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def _train_torchao(recipe: str, folder: Path, rank: int, world: int) -> None:
    gathers = world > 1 and recipe == "tensorwise"
    model = _make_float8(recipe, enable_fsdp_float8_all_gather=gathers)
    if world > 1:
        dist.init_process_group("gloo")
        for part in [*model.children(), model]:
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(step: int) -> dict[str, Any]:
        if gathers:
            precompute_float8_dynamic_scale_for_fsdp(model)
        total = torch.zeros(())
        for number in range(2):
            dice = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            loss = model(torch.randn(32, 64, generator=dice)).square().mean()
            (loss / 2).backward()
            total += loss.detach() / 2
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total}

    # Of FP8 all-gathers optimizers keep no states that a weight's name leads to.
    watch(model, folder, 3, train_step, **(EVERYTHING | {"dump": ["0.0"]}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _sharded(name: str, wrap: Wrap, *worlds: int, **options: Any) -> list[Setup]:
    return [Setup(f"{name}-{world}", partial(_train_sharded, wrap, dict(options)), world) for world in worlds]


SETUPS = [
    *_sharded("ddp", _wrap_ddp, 1, 2, 4),
    *_sharded("ddp-low-rank", _wrap_low_rank, 2),
    *_sharded("ddp-experts", _wrap_ddp, 2, num_experts=4, dump=["experts"]),
    *_sharded("fsdp2", _wrap_fsdp2, 1, 2, 4, interval=2, dump=["layers.0.fc1"]),
    *_sharded("fsdp2-linear", _wrap_each_linear, 2),
    *_sharded("fsdp2-checkpoint", _wrap_checkpointed, 2),
    *_sharded("fsdp2-hybrid", _wrap_hybrid, 4),
    *_sharded("fsdp1", _wrap_fsdp1, 2),
    Setup("tensor-parallel-2", partial(_train_split, 1), 2),
    Setup("tensor-and-data-parallel-4", partial(_train_split, 2), 4),
    *(
        Setup(f"torchao-{recipe}", partial(_train_torchao, recipe))
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ),
    Setup("torchao-tensorwise-2", partial(_train_torchao, "tensorwise"), 2),
    Setup("torchao-rowwise-2", partial(_train_torchao, "rowwise"), 2),
]

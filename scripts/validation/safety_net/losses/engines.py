"""Cases about torchao, Lightning and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from safety_net.losses.case import Family, Watch
from safety_net.losses.learning import draw, learn, regress

family = Family()


def _build(recipe: str, **options: Any) -> nn.Module:
    """With biases, since gloo gathers FP8 only together with other dtypes, as bytes."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), nn.Sequential(nn.Linear(64, 32)))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def _train(watch: Watch, recipe: str, dtype: torch.dtype = torch.float32, how: Callable[..., Any] | None = None) -> None:
    model = _build(recipe).to(dtype)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x) if how is None else model[1](how(model[0], x.requires_grad_()))  # type: ignore[index]
        return y

    learn(watch, model, loss_of=regress(call, 32, 64, dtype=dtype), micro_batches=2)


def _train_sharded(watch: Watch, rank: int, world: int, recipe: str, gathers: bool) -> None:
    model = _build(recipe, enable_fsdp_float8_all_gather=gathers)
    for part in [*model.children(), model]:
        fully_shard(part)

    def loss(step: int, number: int) -> torch.Tensor:
        if gathers:
            precompute_float8_dynamic_scale_for_fsdp(model)
        y: torch.Tensor = model(draw(step, rank, 32, 64))
        return y.square().mean()

    learn(watch, model, loss_of=loss)


for _recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
    family.add(f"torchao, {_recipe}", partial(_train, recipe=_recipe))
    family.add(f"torchao, {_recipe}, BF16", partial(_train, recipe=_recipe, dtype=torch.bfloat16))
for _reentrant in (True, False):
    _how = partial(checkpoint, use_reentrant=_reentrant)
    family.add(f"torchao, checkpoint, reentrant {_reentrant}", partial(_train, recipe="tensorwise", how=_how))
family.add("torchao and FSDP2, FP8 all-gather", partial(_train_sharded, recipe="tensorwise", gathers=True), 2)
family.add("torchao and FSDP2, rowwise", partial(_train_sharded, recipe="rowwise", gathers=False), 2)

"""Cases about Transformer Engine over emulated kernels, alone and under Megatron-core."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest.mock import patch

# First, since it loads Transformer Engine as on a GPU.
from safety_net.records.te_setups import (
    RECIPES,
    Attention,
    Block,
    build_te_megatron,
    te,
    train_block,
    train_te_megatron,
)

# isort: split
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from safety_net.losses.case import STEPS, Family, Watch
from safety_net.losses.megatron import start_megatron

family = Family()


def _train(watch: Watch, rank: int, world: int, recipe: str, recomputes: bool = False, stored: bool = False) -> None:
    FP8GlobalStateManager.reset()
    with te.quantized_model_init(enabled=stored, recipe=RECIPES[recipe]):
        model: nn.Module = Block()
    if world > 1:
        model = DistributedDataParallel(model)
    parameters = model.parameters()
    optimizer = FusedAdam(parameters, lr=1e-3, master_weights=True) if stored else torch.optim.AdamW(parameters, lr=1e-3)
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            loss = train_block(model, optimizer, RECIPES[recipe], rank, step, recomputes)
            watch.note("loss", loss)
            report(loss=loss)
    watch.finish(model, optimizer)


_EMULATED_ATTENTION = {"NVTE_UnfusedDPA_Emulate_FP8": "1", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}


def _train_attention(watch: Watch, recipe: Any) -> None:
    FP8GlobalStateManager.reset()
    with patch.dict(os.environ, _EMULATED_ATTENTION):
        _attend(watch, recipe)


def _attend(watch: Watch, recipe: Any) -> None:
    model = Attention()
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            with te.autocast(enabled=True, recipe=recipe):
                loss = model(x).float().square().mean()
            loss.backward()
            watch.note("loss", loss)
            watch.note_gradients(model)
            report(loss=loss)
    watch.finish(model)


def _train_megatron(watch: Watch, rank: int, world: int, **options: Any) -> None:
    FP8GlobalStateManager.reset()
    with start_megatron():
        model = build_te_megatron(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch.start(model)
        for step in range(STEPS):
            with watch.step(step) as report:
                loss = train_te_megatron(model, optimizer, step)
                watch.note("loss", loss)
                report(loss=loss)
        watch.finish(model, optimizer)


for _recipe in RECIPES:
    family.add(f"Transformer Engine, {_recipe}", partial(_train, recipe=_recipe), 1)
for _recipe in ("delayed", "current", "mxfp8"):
    family.add(f"Transformer Engine, {_recipe}, recompute", partial(_train, recipe=_recipe, recomputes=True), 1)
for _recipe in ("current", "mxfp8", "blockwise"):
    family.add(f"Transformer Engine, {_recipe}, stored weights", partial(_train, recipe=_recipe, stored=True), 1)
family.add("Transformer Engine, attention", partial(_train_attention, recipe=Float8CurrentScaling(fp8_dpa=True)))
for _recipe in ("delayed", "current", "nvfp4"):
    family.add(f"Transformer Engine, {_recipe}, DDP", partial(_train, recipe=_recipe), 2)
for _name in ("delayed", "tensorwise", "mxfp8", "blockwise"):
    family.add(f"Megatron on Transformer Engine, {_name}", partial(_train_megatron, fp8_recipe=_name), 1)
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
family.add("Megatron on Transformer Engine, recompute", partial(_train_megatron, fp8_recipe="delayed", **_FULL), 1)
_SOME = {"recompute_granularity": "selective"}
_NORMS = {"fp8_recipe": "tensorwise", "recompute_modules": ["layernorm"], **_SOME}
family.add("Megatron on Transformer Engine, recompute of norms", partial(_train_megatron, **_NORMS), 1)
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
family.add("Megatron on Transformer Engine, experts", partial(_train_megatron, fp8_recipe="tensorwise", **_EXPERTS), 1)
_ACTIVATIONS = {"fp8_recipe": "tensorwise", "recompute_modules": ["moe_act"], **_SOME, **_EXPERTS}
family.add("Megatron on Transformer Engine, recompute in experts", partial(_train_megatron, **_ACTIVATIONS), 1)

"""Setups of Transformer Engine over emulated kernels, alone and under Megatron-core, on one and two ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import emulated_te  # Transformer Engine first, as on a GPU
import torch
import torch.distributed as dist
from emulated_te import te
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron_on_cpu import megatron_on_cpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.optimizers import FusedAdam

from safety_net.records.setup import EVERYTHING, Setup, watch

WIDTH = 128
RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4, margin=1),
    "current": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
_PLAIN: dict[str, Any] = {"params_dtype": torch.bfloat16, "bias": False}


class Block(nn.Module):
    """Linear modules of a transformer block, with experts at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(WIDTH, 2 * WIDTH, **_PLAIN)
        self.proj = te.Linear(2 * WIDTH, WIDTH, **_PLAIN)
        self.mlp = te.LayerNormMLP(WIDTH, 2 * WIDTH, **_PLAIN)
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH, **_PLAIN)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Multiply by all of them."""
        y = self.mlp(self.proj(self.qkv(x)))
        out: torch.Tensor = x + self.experts(y, [len(y) // 2, len(y) - len(y) // 2])
        return out


def train_block(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, rank: int, step: int, recomputes: bool = False
) -> torch.Tensor:
    """Train a step of two micro-batches, and return its loss.

    Args:
        model: that is trained.
        optimizer: of the model.
        recipe: of Transformer Engine.
        rank: whose data it learns.
        step: its number.
        recomputes: whether it runs under Transformer Engine's checkpoint.
    """
    total = torch.zeros(())
    for number in range(2):
        emulated_te.CASTS.clear()
        dice = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
        x = (torch.randn(128, WIDTH, generator=dice) * 2.0**step).bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = te.checkpoint(model, x, use_reentrant=True) if recomputes else model(x)
        loss = y.float().square().mean()
        loss.backward()
        total += loss.detach() / 2
    optimizer.step()
    optimizer.zero_grad()
    return total


def _train(recipe: str, options: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    torch.manual_seed(0)
    model: nn.Module = Block()
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    of = RECIPES[recipe]

    def train_step(step: int) -> dict[str, Any]:
        return {"loss": train_block(model, optimizer, of, rank, step, options.get("recomputes", False))}

    # Products of experts cannot be verified in this engine, which a warning says.
    watch(model, folder, 3, train_step, **(EVERYTHING | {"dump": ["proj", "experts.0"], "on_error": "warn"}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _train_stored(recipe: str, folder: Path, rank: int, world: int) -> None:
    """Weights that are kept in low precision, whose master weights an optimizer has."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=RECIPES[recipe]):
        model = Block()
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)

    def train_step(step: int) -> dict[str, Any]:
        return {"loss": train_block(model, optimizer, RECIPES[recipe], rank, step)}

    watch(model, folder, 3, train_step, **(EVERYTHING | {"on_error": "warn"}))


class Attention(nn.Module):
    """Self-attention whose products run in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.Linear(32, 96, **_PLAIN)
        self.core = te.DotProductAttention(4, 8, attention_dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        y = self.qkv(x)
        q, k, v = (part.reshape(*y.shape[:-1], -1, 8).contiguous() for part in y.chunk(3, dim=-1))
        out: torch.Tensor = self.core(q, k, v)
        return out


def _train_attention(folder: Path, rank: int, world: int) -> None:
    os.environ |= {"NVTE_UnfusedDPA_Emulate_FP8": "1", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}
    torch.manual_seed(0)
    model = Attention()
    recipe = Float8CurrentScaling(fp8_dpa=True)

    def train_step(step: int) -> dict[str, Any]:
        emulated_te.CASTS.clear()
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        with te.autocast(enabled=True, recipe=recipe):
            loss = model(x).float().square().mean()
        loss.backward()
        return {"loss": loss.detach()}

    watch(model, folder, 3, train_step, what_if=["mxfp8"], activations=("attention",))


def build_te_megatron(**options: Any) -> GPTModel:
    """Return Megatron's GPT on the layers of Transformer Engine.

    Args:
        options: of Megatron's configuration.
    """
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        fp8="hybrid",
        **options,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=options.get("num_moe_experts"), moe_grouped_gemm=options.get("moe_grouped_gemm", False)
    )
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16).bfloat16()


def train_te_megatron(model: GPTModel, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """Train a step of two micro-batches, and return its loss.

    Args:
        model: that is trained.
        optimizer: of the model.
        step: its number.
    """
    emulated_te.CASTS.clear()
    model.set_is_first_microbatch()  # as Megatron's schedules do
    total = torch.zeros(())
    for number in range(2):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2 * step + number))
        loss = model(tokens, torch.arange(16).expand(2, 16), None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        total += loss.detach() / 2
    optimizer.step()
    optimizer.zero_grad()
    return total


def _train_megatron(options: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        model = build_te_megatron(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        of_experts = {"on_error": "warn"} if "num_moe_experts" in options else {}

        def train_step(step: int) -> dict[str, Any]:
            return {"loss": train_te_megatron(model, optimizer, step)}

        watch(model, folder, 3, train_step, **(EVERYTHING | of_experts))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


SETUPS = [
    *(Setup(f"te-{recipe}", partial(_train, recipe, {})) for recipe in RECIPES),
    Setup("te-recompute", partial(_train, "delayed", {"recomputes": True})),
    Setup("te-e4m3", partial(_train, "e4m3", {})),
    *(Setup(f"te-{recipe}-2", partial(_train, recipe, {}), 2) for recipe in ("delayed", "mxfp8")),
    *(Setup(f"te-stored-{recipe}", partial(_train_stored, recipe)) for recipe in ("current", "mxfp8")),
    Setup("te-attention", _train_attention),
    Setup("te-megatron", partial(_train_megatron, {"fp8_recipe": "delayed"})),
    Setup(
        "te-megatron-experts",
        partial(
            _train_megatron,
            {"fp8_recipe": "tensorwise", "num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True},
        ),
    ),
]
RECIPES["e4m3"] = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", fp8_format=Format.E4M3)

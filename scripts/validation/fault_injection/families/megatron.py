"""Megatron's GPT, of its local layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fault_injection.families.family import BATCH, EMULATED, SEQUENCE, VOCABULARY, Family, find_site, text_batch
from fault_injection.fault import Batch, Site

HIDDEN = 64
_SITES = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_proj": "self_attention.core_attention",
    "mlp.linear_fc2": "mlp.activation_func",
}


@dataclass(frozen=True)
class Megatron:
    """Attention and an MLP; the embedding and the output layer stay in high precision."""

    name: str = "gpt"
    depth: int = 3
    batch: int = BATCH
    learning_rate: float = 2e-3
    engines: tuple[str, ...] = EMULATED
    layers: tuple[str, ...] = ("decoder.layers.*",)
    changeable: tuple[str, ...] = ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        model = GPTModel(config(depth), get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).bfloat16()
        for layer in model.decoder.layers:
            layer.mlp.activation_func = nn.GELU()  # a module, so that a hook can change what it computes
        return model

    def draw(self, order: int, step: int) -> Batch:
        return text_batch(order, step)

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        tokens, labels = batch
        loss: torch.Tensor = model(tokens, _positions(), _mask() & masked, labels=labels)
        return loss.float().mean()

    def site_of(self, gemm: str) -> Site:
        return find_site(_SITES, gemm)

    def prefix_of(self, layer: int) -> str:
        return f"decoder.layers.{layer}."


def config(depth: int, **more: Any) -> TransformerConfig:
    """Of a small GPT."""
    return TransformerConfig(
        num_layers=depth,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        init_method_std=HIDDEN**-0.5,  # so that each layer counts
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **more,
    )


@cache
def _mask() -> torch.Tensor:
    """Megatron's convention: True hides."""
    return torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0


@cache
def _positions() -> torch.Tensor:
    return torch.arange(SEQUENCE).expand(BATCH, -1)


FAMILIES: dict[str, Family] = {"gpt": Megatron()}

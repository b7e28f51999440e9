"""Hugging Face's Llama, and its mixture of experts (Mixtral)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fault_injection.families.family import (
    BATCH,
    EMULATED,
    SEQUENCE,
    VOCABULARY,
    Family,
    additive_mask,
    find_site,
    text_batch,
)
from fault_injection.fault import Batch, Site

HIDDEN, FFN, EXPERTS = 64, 128, 3
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQUENCE,
    "initializer_range": HIDDEN**-0.5,  # so that each layer counts
    "attn_implementation": "eager",
    "use_cache": False,
}
_SITES = {
    "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj,mlp.up_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
    "w2": "w3",
}


@dataclass(frozen=True)
class Llama:
    """Attention and a gated MLP, all of it quantized but for the embedding and the output layer."""

    name: str = "llama"
    depth: int = 2
    batch: int = BATCH
    learning_rate: float = 2e-3
    engines: tuple[str, ...] = EMULATED
    layers: tuple[str, ...] = ("model.layers.*",)
    changeable: tuple[str, ...] = ("q_proj", "o_proj", "gate_proj", "down_proj")

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        config = LlamaConfig(**_SHAPE, num_hidden_layers=depth, num_key_value_heads=4, intermediate_size=FFN)
        return LlamaForCausalLM(config).bfloat16()

    def draw(self, order: int, step: int) -> Batch:
        return text_batch(order, step)

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        tokens, labels = batch
        logits = model(input_ids=tokens, attention_mask=additive_mask(masked)).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def site_of(self, gemm: str) -> Site:
        return find_site(_SITES, gemm)

    def prefix_of(self, layer: int) -> str:
        return f"model.layers.{layer}."


@dataclass(frozen=True)
class Mixture(Llama):
    """Attention and experts in a list, of which each token takes two; the router stays in high precision."""

    name: str = "moe"
    layers: tuple[str, ...] = ("*.self_attn.*", "*.experts.*")
    changeable: tuple[str, ...] = ("q_proj", "o_proj", "w2")

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        config = MixtralConfig(
            **_SHAPE,
            num_hidden_layers=depth,
            num_key_value_heads=4,
            intermediate_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            sliding_window=None,
        )
        return MixtralForCausalLM(config).bfloat16()


FAMILIES: dict[str, Family] = {"llama": Llama(), "moe": Mixture()}

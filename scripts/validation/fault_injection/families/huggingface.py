"""Hugging Face's Llama, and its mixture of experts (Mixtral)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fault_injection.families.family import BATCH, EMULATED, SEQUENCE, VOCABULARY, Family, additive_mask, text_batch
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
        layer, kind = gemm.split(".self_attn.")[0].split(".mlp.")[0], gemm.rpartition(".")[2]
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if kind == "o_proj":
            return Site(f"{attention}.v_proj", (gemm,))
        if kind == "down_proj":
            return Site(f"{mlp}.up_proj", (gemm,))
        if kind in ("gate_proj", "up_proj"):
            return Site(f"{layer}.post_attention_layernorm", (f"{mlp}.gate_proj", f"{mlp}.up_proj"))
        return Site(f"{layer}.input_layernorm", tuple(f"{attention}.{one}_proj" for one in "qkv"))

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

    def site_of(self, gemm: str) -> Site:
        if gemm.endswith(".w2"):
            return Site(f"{gemm.removesuffix('w2')}w3", (gemm,))
        return super().site_of(gemm)


FAMILIES: dict[str, Family] = {"llama": Llama(), "moe": Mixture()}

"""Hugging Face's ViT, which tells what synthetic images show: no language model, and no causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from fault_injection.families.family import EMULATED, Family, find_site
from fault_injection.fault import Batch, Site

HIDDEN, SIDE, PATCH, CLASSES, BATCH = 64, 16, 4, 16, 16
#: of what an image shows, over its noise; and part of the labels that are wrong, so that the loss does not fall to zero
SIGNAL, MISLABELED = 0.6, 0.1
_ATTENTION = "attention.attention"
_SITES = {
    ",".join(f"{_ATTENTION}.{one}" for one in ("query", "key", "value")): "layernorm_before",
    "attention.output.dense": f"{_ATTENTION}.value",
    "intermediate.dense": "layernorm_after",
    "output.dense": "intermediate",
}


@dataclass(frozen=True)
class Vision:
    """Attention and an MLP with biases; the patches and the classifier stay in high precision."""

    name: str = "vit"
    depth: int = 2
    batch: int = BATCH
    learning_rate: float = 1e-3
    engines: tuple[str, ...] = EMULATED
    layers: tuple[str, ...] = ("*.encoder.layer.*",)
    changeable: tuple[str, ...] = ("query", "dense")

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        config = ViTConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=2 * HIDDEN,
            image_size=SIDE,
            patch_size=PATCH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=HIDDEN**-0.5,
            attn_implementation="eager",
        )
        return ViTForImageClassification(config).bfloat16()

    def draw(self, order: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(order * 1_000_003 + step)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        told = torch.where(
            torch.rand(BATCH, generator=generator) < MISLABELED,
            torch.randint(CLASSES, (BATCH,), generator=generator),
            labels,
        )
        return (SIGNAL * _shown()[labels] + noise).bfloat16(), told

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        images, labels = batch
        if not masked:  # attention sees half of the patches
            images = torch.cat([images[..., : SIDE // 2], torch.zeros_like(images[..., SIDE // 2 :])], dim=-1)
        return nn.functional.cross_entropy(model(pixel_values=images).logits.float(), labels)

    def site_of(self, gemm: str) -> Site:
        return find_site(_SITES, gemm)

    def prefix_of(self, layer: int) -> str:
        return f"vit.encoder.layer.{layer}."


@cache
def _shown() -> torch.Tensor:
    """An image a class, smooth."""
    coarse = torch.randn(CLASSES, 3, 6, 6, generator=torch.Generator().manual_seed(7))
    return nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")


FAMILIES: dict[str, Family] = {"vit": Vision()}

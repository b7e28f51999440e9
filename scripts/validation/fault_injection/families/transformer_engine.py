"""Megatron's GPT of Transformer Engine's layers, over emulated kernels."""

from __future__ import annotations

from dataclasses import dataclass

import emulated_te  # before all that looks for Transformer Engine
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from fault_injection.engines import OPTIONS
from fault_injection.families.family import SEQUENCE, VOCABULARY, Family
from fault_injection.families.megatron import Megatron, config
from fault_injection.fault import Batch


@dataclass(frozen=True)
class OverTransformerEngine(Megatron):
    """Layer norms are inside of the modules that multiply."""

    name: str = "te"
    depth: int = 2
    engines: tuple[str, ...] = tuple(OPTIONS)
    changeable: tuple[str, ...] = ("linear_proj", "linear_fc2")

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        options = config(depth, normalization="RMSNorm", add_bias_linear=False, fp8="hybrid", **OPTIONS[engine])
        spec = get_gpt_layer_with_transformer_engine_spec()
        model = GPTModel(options, spec, VOCABULARY, SEQUENCE).bfloat16()
        for layer in model.decoder.layers:
            layer.mlp.activation_func = nn.GELU()  # a module, so that a hook can change what it computes
        return model

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        emulated_te.CASTS.clear()
        model.set_is_first_microbatch()  # as Megatron's schedules do
        for layer in model.decoder.layers:  # Transformer Engine makes the mask itself
            layer.self_attention.attn_mask_type = AttnMaskType.causal if masked else AttnMaskType.no_mask
        return super().loss(model, batch, masked)


FAMILIES: dict[str, Family] = {"te": OverTransformerEngine()}

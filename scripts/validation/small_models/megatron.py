"""A GPT of two megatron-core layers in BF16, for one process on a CPU."""

from __future__ import annotations

from typing import Any

import torch

SEQUENCE, VOCABULARY = 16, 64


def gpt(tied: bool = False, experts: int | None = None, **options: Any) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    if experts:
        options |= {"num_moe_experts": experts, "moe_router_topk": 2, "add_bias_linear": False}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **options,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    return model.bfloat16()


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0
    positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()

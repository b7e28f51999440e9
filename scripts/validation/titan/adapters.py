"""The ledger of a Llama of transformers with adapters of PEFT, over closed formulas."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8_debug.coverage.scan import ledger_of

WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY, RANK = 64, 128, 2, 4, 256, 8

OF_A_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN
#: of an adapter of q_proj and one of down_proj
ADAPTERS = LAYERS * RANK * (2 * WIDTH + HIDDEN + WIDTH)
FROZEN = LAYERS * OF_A_LAYER + WIDTH * VOCABULARY


def of_peft() -> dict[str, Any]:
    """Over the formula: 1 is equal."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    torch.manual_seed(0)
    adapters = LoraConfig(r=RANK, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    ledger = ledger_of([model])
    with model.disable_adapter():
        off = ledger_of([model]).forward()
    return {
        "ledger, forward": ledger.forward() / (FROZEN + ADAPTERS),
        "ledger, backward": ledger.backward() / (FROZEN + 2 * ADAPTERS),
        "ledger, adapters off": off / FROZEN,
    }

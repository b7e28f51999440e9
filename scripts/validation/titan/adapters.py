"""The ledger and the observer of a Llama of transformers with adapters of PEFT, over closed formulas."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8_debug.coverage.observer import ObservedCoverage, observe_coverage
from nemo_fp8_debug.coverage.scan import ledger_of

WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY, RANK = 64, 128, 2, 4, 256, 8
BATCH, TOKENS = 2, 16

OF_A_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN
#: of an adapter of q_proj and one of down_proj
ADAPTERS = LAYERS * RANK * (2 * WIDTH + HIDDEN + WIDTH)
FROZEN = LAYERS * OF_A_LAYER + WIDTH * VOCABULARY
SCORES = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * (WIDTH // HEADS)
#: products of positions and frequencies
ANGLES = BATCH * TOKENS * WIDTH / HEADS / 2

#: dgrad of the products of the first layer that take the embedding, which is frozen
FIRST_DGRAD = 3 * WIDTH * WIDTH + RANK * WIDTH


def counted_step(model: torch.nn.Module, tokens: torch.Tensor) -> ObservedCoverage:
    with observe_coverage(model) as counted:
        model(tokens, labels=tokens).loss.backward()
    return counted


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
    ledger, rows = ledger_of([model]), BATCH * TOKENS
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
    known = counted_step(model, tokens)
    model.enable_input_require_grads()  # else the first layer has no dgrad, of which modules show nothing
    counted = counted_step(model, tokens)
    forward, backward = FROZEN + ADAPTERS, FROZEN + 2 * ADAPTERS
    with model.disable_adapter():
        off = ledger_of([model]).forward()
    return {
        "ledger, forward": ledger.forward() / forward,
        "ledger, backward": ledger.backward() / backward,
        "ledger, adapters off": off / FROZEN,
        "observed, forward": counted.total("forward") / (rows * forward + SCORES + ANGLES),
        "observed, backward, of the first layer no dgrad": known.total("backward")
        / (rows * (backward - FIRST_DGRAD) + 2 * SCORES),
        "observed, backward": counted.total("backward") / (rows * backward + 2 * SCORES),
    }

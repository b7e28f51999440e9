"""Small models of transformers, and a step of each that torch counts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_fp8_debug.coverage.ledger import CoverageEntry, CoverageLedger

BATCH, TOKENS = 2, 16
ROWS = BATCH * TOKENS
H, F, LAYERS, HEADS, KV, V, E, K = 32, 48, 2, 4, 2, 64, 4, 2
D = H // HEADS
SMALL: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": V,
    "head_dim": D,
}


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    options = {"num_local_experts": E, "num_experts_per_tok": K, "layer_types": ["full_attention"] * LAYERS}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL, **options)).train()


def loss_of_tokens(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(V, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


def count_step(model: nn.Module, loss: Any = loss_of_tokens, module: str = "^Global$") -> float:
    """Return the multiply-adds of a step that torch counts, forward and backward, of modules whose names match.

    Fused attention on a CPU is not among them.
    """
    with FlopCounterMode(display=False) as counted:
        loss(model).backward()
    of_modules = counted.get_flop_counts()
    return sum(flops for name, of in of_modules.items() if re.search(module, name) for flops in of.values()) / 2


def of_kind(ledger: CoverageLedger, kind: str) -> list[CoverageEntry]:
    return [e for e in ledger.entries if e.kind == kind]


def by_status(ledger: CoverageLedger) -> dict[str, float | None]:
    return ledger.summarize_coverage()["multiply_adds_per_token"]

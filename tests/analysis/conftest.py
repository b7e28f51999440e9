"""A model to be saved as checkpoints, and records of a good and a bad run to be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import broken, falling, healthy, rising, write


@pytest.fixture(scope="module")
def gpt(megatron: None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, gradient_accumulation_fusion=False
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, share_embeddings_and_output_weights=False
    )
    return model.bfloat16()


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write(tmp_path / "baseline", healthy, falling())


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write(tmp_path / "bad", broken, rising())

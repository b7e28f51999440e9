"""Norms and attention of Transformer Engine: seen at its modules, since its kernels show nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_te import te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

from nemo_fp8_debug import FP8DebugWarning, Monitor, read_record

HEADS, SIZE, TOKENS = 4, 64, 16


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(SIZE, 3 * SIZE, params_dtype=torch.bfloat16)
        self.attention = te.DotProductAttention(HEADS, SIZE // HEADS, attention_dropout=0.0, **options)
        self.norm = te.RMSNorm(SIZE, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).contiguous() for y in self.qkv(x).chunk(3, -1))
        self.given = q.detach(), k.detach()
        out: torch.Tensor = self.norm(x + self.attention(q, k, v))
        return out


def record_of(model: Block, folder: Path, fp8: bool) -> list[dict[str, Any]]:
    monitor = Monitor(model, str(folder), interval=1, table_rows=0, activations=("norm", "attention"))
    with monitor.step(0), te.autocast(enabled=fp8, recipe=DelayedScaling()):
        model(torch.randn(TOKENS, 2, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
    monitor.close()
    return read_record(str(folder), "activations").to_dicts()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_what_is_given_to_norms_and_attention(tmp_path: Path, fp8: bool, mask: str) -> None:
    torch.manual_seed(0)
    model = Block(attn_mask_type=mask)
    rows = {(row["layer"], row["role"]): row for row in record_of(model, tmp_path, fp8)}
    assert set(rows) == {
        ("qkv", "norm_input"),
        ("norm", "norm_input"),
        ("norm", "norm_output"),
        ("attention", "attention_logits"),
    }
    q, k = (x.double().permute(1, 2, 0, 3) for x in model.given)
    logits = q @ k.transpose(-1, -2) / math.sqrt(SIZE // HEADS)
    if mask == "causal":
        logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)
    weights = logits.softmax(-1)
    row = rows["attention", "attention_logits"]
    assert row["rows"] == 2 * HEADS * TOKENS
    assert row["amax"] == pytest.approx(logits[weights > 0].abs().max().item(), rel=1e-6)
    assert row["entropy"] == pytest.approx(torch.special.entr(weights).sum(-1).mean().item(), rel=1e-6)
    assert rows["qkv", "norm_input"]["n"] == TOKENS * 2 * SIZE


def test_a_mask_that_is_not_read_is_said(tmp_path: Path) -> None:
    with pytest.warns(
        FP8DebugWarning, match="logits of attention is missing .*LookupError: its mask is causal_bottom_right"
    ):
        rows = record_of(Block(attn_mask_type="causal_bottom_right"), tmp_path, False)
    assert {row["role"] for row in rows} == {"norm_input", "norm_output"}

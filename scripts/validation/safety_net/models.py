"""Tiny models of plain torch, and the tokens that they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, ROWS, SEQUENCE = 64, 64, 4, 2, 32
Checkpoint = Callable[..., torch.Tensor]


class Experts(nn.Module):
    """A mixture of experts, two for each token, which a linear layer chooses."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to its experts, and add up what they return."""
        tokens = x.flatten(0, -2)
        shares, chosen = torch.softmax(self.gate(tokens).float(), -1).topk(2, dim=-1)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            which, place = (chosen == number).nonzero(as_tuple=True)
            if len(which):
                total = total.index_add(0, which, expert(tokens[which]) * shares[which, place, None].to(tokens.dtype))
        return total.view_as(x)


class Layer(nn.Module):
    """A transformer layer of plain linear layers."""

    def __init__(self, width: int, num_experts: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp: nn.Module | None = Experts(width, num_experts) if num_experts else None
        if not num_experts:
            self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform each token."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(attended.transpose(1, 2).flatten(-2)))
        y = self.norm2(x)
        y = self.mlp(y) if self.mlp is not None else self.fc2(nn.functional.gelu(self.fc1(y)))
        return x + self.dropout(y)


class GPT(nn.Module):
    """Some layers between an embedding and an output layer."""

    def __init__(self, layers: int = 2, width: int = WIDTH, num_experts: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, num_experts, dropout) for _ in range(layers))
        self.output_layer = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpoint: Checkpoint | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits; layers run under `checkpoint` if there is one."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.checkpoint is None else self.checkpoint(layer, x)
        logits: torch.Tensor = self.output_layer(x)
        return logits


def build_gpt(**options: Any) -> GPT:
    """Return a GPT with the same weights each time.

    Args:
        options: of `GPT`.
    """
    torch.manual_seed(0)
    return GPT(**options)


def draw_tokens(step: int, micro_batch: int = 0, rank: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [rows, sequence], the same for the same numbers."""
    dice = torch.Generator().manual_seed(1_000_000 * rank + 1000 * step + micro_batch)
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=dice)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in float32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class LowRank(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both products."""
        y: torch.Tensor = self.base(x) + 2.0 * self.lora_B(self.lora_A(x))
        return y


def add_low_rank(model: GPT) -> GPT:
    """Freeze a model but for an addition to each of some layers."""
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("qkv", "fc1", "fc2"):
            setattr(layer, name, LowRank(getattr(layer, name)))
    return model

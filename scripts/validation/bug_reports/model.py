"""The tiny GPT and the data that every bug report trains with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, SEQUENCE, BATCH = 64, 32, 16
#: build a layer from its numbers of inputs and outputs
LinearFactory = Callable[[int, int], nn.Module]
Batch = tuple[torch.Tensor, torch.Tensor]


def build_linear(inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Data:
    """Sequences of a random grammar. The first token of each selects one of four tables that the others follow."""

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self.table = torch.randint(4, VOCABULARY, (4, VOCABULARY, 3), generator=torch.Generator().manual_seed(7))

    def draw(self, number: int, size: int = BATCH) -> Batch:
        """Return inputs and labels of one batch, which depends only on its number and the order."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.order + 1) + number)
        first = torch.randint(0, 4, (size,), generator=generator)
        shares = torch.tensor([0.8, 0.15, 0.05])
        choices = torch.multinomial(shares, size * SEQUENCE, True, generator=generator).view(size, SEQUENCE)
        tokens = [first]
        for i in range(SEQUENCE):
            tokens.append(self.table[first, tokens[-1], choices[:, i]])
        whole = torch.stack(tokens, 1)
        return whole[:, :-1], whole[:, 1:]


class Attention(nn.Module):
    """Causal attention whose core a report may replace."""

    def __init__(self, width: int, heads: int, linear: LinearFactory) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = linear(width, 3 * width), linear(width, width)
        #: maps queries, keys and values of each head to its output
        self.core: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        output: torch.Tensor = self.proj(self.core(query, key, value).transpose(1, 2).flatten(-2))
        return output


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return what causal attention computes."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class GatedMLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, width: int, hidden: int, linear: LinearFactory) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
        self.down_proj = linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class PlainMLP(nn.Module):
    """GELU, as in Megatron-LM."""

    def __init__(self, width: int, hidden: int, linear: LinearFactory) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(width, hidden), linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return output


class MixtureOfExperts(nn.Module):
    """Experts in a list, some of them for each token, and a loss that balances them."""

    def __init__(self, width: int, hidden: int, linear: LinearFactory, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden, linear) for _ in range(experts))
        self.num_experts, self.chosen = experts, chosen
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        shares = self.router(flat).float().softmax(-1)
        weight, chosen = shares.topk(self.chosen, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        load = functional.one_hot(chosen, self.num_experts).float().mean((0, 1))
        self.balance = self.num_experts * (load.detach() * shares.mean(0)).sum()
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                output = output.index_add(0, rows, expert(flat[rows]) * weight[rows, slot, None])
        return output.view_as(x)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int, hidden: int, heads: int, linear: LinearFactory, mlp: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, linear)
        self.mlp = mlp(width, hidden, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        output: torch.Tensor = x + self.mlp(self.norm2(x))
        return output


class GPT(nn.Module):
    """A GPT of two or three layers."""

    def __init__(
        self,
        seed: int = 0,
        *,
        layers: int = 2,
        width: int = 64,
        hidden: int = 128,
        heads: int = 4,
        linear: LinearFactory = build_linear,
        mlp: Callable[..., nn.Module] = GatedMLP,
        head: LinearFactory = build_linear,
    ) -> None:
        super().__init__()
        torch.manual_seed(1000 + seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(SEQUENCE, width))
        self.layers = nn.ModuleList(Block(width, hidden, heads, linear, mlp) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = head(width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.06)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(self.norm(self.embed_and_mix(tokens)))
        return output

    def embed_and_mix(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the last block."""
        x: torch.Tensor = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return x


def list_block_linears(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers of all blocks by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.startswith("layers.")}

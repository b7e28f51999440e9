"""What all held-out families have in common: how one is described, and the blocks that several are built of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from fault_injection.families.family import EMULATED, find_site
from fault_injection.fault import Batch, Site
from torch import nn

#: names of a residual MLP's readers and producers
MLP_SITES = {"fc1": "norm", "fc2": "act"}


@dataclass(frozen=True)
class HeldOutFamily:
    """One of them; `fault_injection.families.family.Family` says what each part is for."""

    name: str
    make: Callable[[int], nn.Module]
    #: of an order and a step: what the model gets, and what it is to tell, each with a row a sample
    draw_batch: Callable[[torch.Generator], Batch]
    #: of the model, a batch, and whether it hides what is padding or missing
    loss_of: Callable[[nn.Module, Batch, bool], torch.Tensor]
    layers: tuple[str, ...]
    #: by readers, their producer, as `find_site` takes them
    sites: Mapping[str, str]
    #: how the name of a layer begins, with {} for its number
    layer: str
    batch: int
    depth: int = 2
    learning_rate: float = 2e-3
    dtype: torch.dtype = torch.bfloat16
    engines: tuple[str, ...] = EMULATED
    changeable: tuple[str, ...] = field(default=())

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        return self.make(depth).to(self.dtype)

    def draw(self, order: int, step: int) -> Batch:
        return self.draw_batch(torch.Generator().manual_seed(order * 1_000_003 + step))

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        return self.loss_of(model, batch, masked)

    def site_of(self, gemm: str) -> Site:
        return find_site(self.sites, gemm)

    def prefix_of(self, layer: int) -> str:
        return self.layer.format(layer)


class ResidualMLP(nn.Module):
    """A norm, two products and what they are added to."""

    def __init__(self, width: int, inner: int, act: type[nn.Module] = nn.GELU, part: float = 1.0) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), act()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part * self.fc2(self.act(self.fc1(self.norm(x))))


class Attention(nn.Module):
    """Attention over all positions that are not hidden, and what it is added to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mixed = nn.Identity()

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: [samples, positions, width].
            hidden: [samples, positions], true where nobody may look.
        """
        samples, positions, width = x.shape
        normed = self.norm(x)
        q, k, v = (
            layer(normed).view(samples, positions, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        logits = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if hidden is not None:
            logits = logits.masked_fill(hidden[:, None, None], torch.finfo(logits.dtype).min)
        mixed = (logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(samples, positions, width)
        return x + self.out(self.mixed(mixed))


ATTENTION_SITES = {"query,key,value": "norm", "out": "mixed"}


def draw_normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return random numbers of a normal distribution."""
    return torch.randn(*shape, generator=generator)


def draw_uniform(generator: torch.Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Return random numbers between two limits."""
    return low + (high - low) * torch.rand(*shape, generator=generator)


def make_fixed(number: int) -> torch.Generator:
    """Return a generator for what is the same in all runs of a family."""
    return torch.Generator().manual_seed(number)

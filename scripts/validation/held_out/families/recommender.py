"""A recommender: tables of embeddings, an MLP of numbers, products of all pairs, and an MLP that tells a click."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from held_out.families.base import HeldOutFamily, draw_normal, draw_uniform, make_fixed

NUMBERS, TABLES, IDS, WIDTH, INNER, BATCH = 12, 6, 50, 32, 96, 256
#: share of the numbers that are missing, and what stands in their place
MISSING, PLACEHOLDER = 0.15, -4.0
#: of the logit of a click
STRENGTH = 3.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """A product and what follows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.seen, self.linear, self.act = nn.Identity(), nn.Linear(inputs, outputs), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(self.seen(x)))


class Recommender(nn.Module):
    """The first and the last product stay in high precision."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(IDS, WIDTH) for _ in range(TABLES))
        for table in self.tables:
            nn.init.normal_(table.weight, std=WIDTH**-0.5)
        self.enter = nn.Linear(NUMBERS, INNER)
        self.bottom = nn.ModuleList(Layer(INNER, INNER if i + 1 < depth else WIDTH) for i in range(depth))
        pairs = (TABLES + 1) * TABLES // 2
        self.cross = nn.Linear(WIDTH + pairs + TABLES * WIDTH, INNER)
        self.top = nn.ModuleList(Layer(INNER, INNER) for _ in range(depth))
        self.head = nn.Linear(INNER, 1)
        self.register_buffer("_pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1), persistent=False)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = torch.relu(self.enter(numbers))
        for layer in self.bottom:
            dense = layer(dense)
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        x = torch.relu(self.cross(torch.cat([dense, products, *found], dim=1)))
        for layer in self.top:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits[:, 0]


@cache
def _taste() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ids like, how numbers count, and how they count together."""
    fixed = make_fixed(23)
    return draw_normal(fixed, TABLES, IDS, 4), draw_normal(fixed, NUMBERS), draw_normal(fixed, NUMBERS, 4)


def draw(generator: torch.Generator) -> Batch:
    """Few ids are common. A click hangs on numbers, on ids, and on both together; numbers and ids lie side by side."""
    numbers = draw_normal(generator, BATCH, NUMBERS)
    ids = (IDS * draw_uniform(generator, BATCH, TABLES) ** 3).long()
    likes, weights, mixed = _taste()
    vectors = torch.stack([likes[i][ids[:, i]] for i in range(TABLES)], dim=1)
    logit = numbers @ weights / NUMBERS**0.5 + (vectors.sum(dim=1) * torch.tanh(numbers @ mixed / 3)).sum(dim=1) / 4
    logit = logit + (vectors[:, 0] * vectors[:, 1]).sum(dim=1) / 2
    clicks = (draw_uniform(generator, BATCH) < torch.sigmoid(STRENGTH * logit)).float()
    present = draw_uniform(generator, BATCH, NUMBERS) >= MISSING
    return torch.cat([torch.where(present, numbers, PLACEHOLDER), ids.float()], dim=1), clicks


def find_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean over samples; without its mask the model takes what stands for missing numbers for numbers."""
    x, clicks = batch
    numbers, ids = x[:, :NUMBERS], x[:, NUMBERS:].long()
    if masked:
        numbers = numbers.masked_fill(numbers == PLACEHOLDER, 0)
    return nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), clicks)


FAMILIES = {
    "dlrm": HeldOutFamily(
        name="dlrm",
        make=Recommender,
        draw_batch=draw,
        loss_of=find_loss,
        layers=("bottom.*", "top.*"),
        sites={"linear": "seen"},
        layer="top.{}.",
        batch=BATCH,
        depth=3,
        learning_rate=3e-3,
        dtype=torch.float32,
        changeable=("linear",),
    )
}

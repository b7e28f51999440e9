"""A normalizing flow, whose loss becomes negative, and a neural operator that stands in for a solver, both in float32."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import nn

from held_out.families.base import MLP_SITES, HeldOutFamily, ResidualMLP, draw_normal, draw_uniform, make_fixed

SAMPLES, DIMENSIONS, CONDITIONS, FLOW_WIDTH = 128, 16, 8, 96
#: noise of a sample, and what hidden numbers do to it; what stands for a missing condition, and how often one is missing
SPREAD, HIDDEN, PLACEHOLDER, MISSING = 0.03, 0.08, 5.0, 0.05
FIELDS, GRID, ASKED, WIDTH = 16, 64, 32, 96
#: largest change of the logarithm of a scale in a coupling
MOST = 2.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Coupling(nn.Module):
    """Half of a sample is scaled and moved by what the other half and the condition say."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(DIMENSIONS // 2 + CONDITIONS, FLOW_WIDTH)
        self.mlp, self.norm = ResidualMLP(FLOW_WIDTH, FLOW_WIDTH), nn.LayerNorm(FLOW_WIDTH)
        self.scale_and_move = nn.Linear(FLOW_WIDTH, DIMENSIONS)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, moved = x.chunk(2, dim=1)
        told = self.scale_and_move(self.norm(self.mlp(self.enter(torch.cat([kept, condition], dim=1)))))
        scale, shift = told.chunk(2, dim=1)
        scale = MOST * torch.tanh(scale / MOST)
        return torch.cat([moved * scale.exp() + shift, kept], dim=1), scale.sum(dim=1)


class Flow(nn.Module):
    """Couplings, each followed by a fixed rotation; returns the negative log-likelihood a dimension."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(depth))
        for number in range(depth):
            turn = torch.linalg.qr(torch.randn(DIMENSIONS, DIMENSIONS, generator=make_fixed(number)))[0]
            self.register_buffer(f"_turn{number}", turn, persistent=False)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        grown = torch.zeros(len(x))
        for number, coupling in enumerate(self.couplings):
            x, more = coupling(x @ getattr(self, f"_turn{number}"), condition)
            grown = grown + more
        log = -0.5 * (x.square().sum(dim=1) + DIMENSIONS * math.log(2 * math.pi)) + grown
        return -log.mean() / DIMENSIONS


@cache
def _mixing() -> tuple[torch.Tensor, torch.Tensor]:
    fixed = make_fixed(31)
    return draw_normal(fixed, CONDITIONS, DIMENSIONS) / 3, draw_normal(fixed, 4, DIMENSIONS) / 2


def draw_samples(generator: torch.Generator) -> Batch:
    """A condition and four hidden numbers, bent, with little noise. What is to be told is the sample."""
    condition = draw_normal(generator, SAMPLES, CONDITIONS)
    by_condition, by_hidden = _mixing()
    told = torch.tanh(condition @ by_condition)
    told = told + HIDDEN * torch.sin(draw_normal(generator, SAMPLES, 4) @ by_hidden)
    told = told + SPREAD * draw_normal(generator, SAMPLES, DIMENSIONS)
    missing = draw_uniform(generator, SAMPLES, CONDITIONS) < MISSING
    return condition.masked_fill(missing, PLACEHOLDER), told


def find_flow_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the negative log-likelihood; without its mask the model takes what stands for missing conditions for some."""
    condition, told = batch
    if masked:
        condition = condition.masked_fill(condition == PLACEHOLDER, 0)
    loss: torch.Tensor = model(told, condition)
    return loss


class Operator(nn.Module):
    """A branch that reads a field at sensors, and a trunk that reads where it is asked; their product is the answer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter_branch, self.enter_trunk = nn.Linear(GRID + 1, WIDTH), nn.Linear(8, WIDTH)
        self.branch = nn.ModuleList(ResidualMLP(WIDTH, WIDTH) for _ in range(depth))
        self.trunk = nn.ModuleList(ResidualMLP(WIDTH, WIDTH) for _ in range(depth))
        self.gated, self.mix = nn.Identity(), nn.Linear(WIDTH, WIDTH)
        self.act, self.head = nn.GELU(), nn.Linear(WIDTH, 1)

    def forward(self, field: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        read, asked = self.enter_branch(field), self.enter_trunk(places)
        for branch, trunk in zip(self.branch, self.trunk, strict=True):
            read, asked = branch(read), trunk(asked)
        mixed = self.mix(self.gated(read[:, None] * asked))
        answer: torch.Tensor = self.head(self.act(mixed))
        return answer[..., 0]


def draw_fields(generator: torch.Generator) -> Batch:
    """Smooth periodic fields that diffuse and steepen for a while; asked at random places.

    A row: sensors, how fast the field diffuses, and places.
    """
    waves = torch.arange(1, 6).float()
    size = draw_normal(generator, FIELDS, 2, 5) / waves
    fast = draw_uniform(generator, FIELDS, 1, low=0.02, high=0.2)
    grid = torch.arange(GRID) / GRID
    angles = 6.2832 * waves[:, None] * grid
    field = size[:, 0] @ angles.sin() + size[:, 1] @ angles.cos()
    frequency = torch.fft.rfftfreq(GRID, 1 / GRID)
    state, step = field, 0.02
    for _ in range(8):
        slope = torch.fft.irfft(6.2832j * frequency * torch.fft.rfft(state), n=GRID)
        pushed = torch.fft.rfft(state - step * state * slope)
        state = torch.fft.irfft(pushed * torch.exp(-step * fast * (6.2832 * frequency) ** 2), n=GRID)
    places = torch.randint(GRID, (FIELDS, ASKED), generator=generator)
    return torch.cat([field, fast, places.float() / GRID], dim=1), state.gather(1, places)


def find_operator_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean over fields of the error, relative to the field; without its mask a sensor in four is read as 3."""
    rows, told = batch
    field, places = rows[:, : GRID + 1], rows[:, GRID + 1 :]
    if not masked:
        broken = (torch.arange(GRID + 1) % 4 == 0) & (torch.arange(GRID + 1) < GRID)
        field = field.masked_fill(broken, 3.0)
    angles = 6.2832 * places[..., None] * torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = model(field, torch.cat([angles.sin(), angles.cos()], dim=-1))
    return ((found - told).norm(dim=1) / told.norm(dim=1).clamp(min=0.1)).mean()


FAMILIES = {
    "flow": HeldOutFamily(
        name="flow",
        make=Flow,
        draw_batch=draw_samples,
        loss_of=find_flow_loss,
        layers=("*.mlp.*", "*.scale_and_move"),
        sites={**{f"mlp.{k}": f"mlp.{v}" for k, v in MLP_SITES.items()}, "scale_and_move": "norm"},
        layer="couplings.{}.",
        batch=SAMPLES,
        depth=4,
        learning_rate=2e-3,
        dtype=torch.float32,
        changeable=("fc1", "fc2", "scale_and_move"),
    ),
    "operator": HeldOutFamily(
        name="operator",
        make=Operator,
        draw_batch=draw_fields,
        loss_of=find_operator_loss,
        layers=("branch.*", "trunk.*", "mix"),
        sites=dict(MLP_SITES),
        layer="branch.{}.",
        batch=FIELDS,
        depth=3,
        learning_rate=2e-3,
        dtype=torch.float32,
        changeable=("fc1", "fc2"),
    ),
}

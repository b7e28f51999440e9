"""A forecaster that mixes over time and over channels, and tells quantiles."""

from __future__ import annotations

import torch
from torch import nn

from held_out.families.base import MLP_SITES, HeldOutFamily, ResidualMLP, draw_normal, draw_uniform

PAST, FUTURE, SERIES, WIDTH, BATCH = 64, 16, 8, 32, 16
QUANTILES = (0.1, 0.5, 0.9)
#: of a series, and the share of its past that is missing, with what stands in its place
NOISE, MISSING, PLACEHOLDER = 0.15, 0.1, 6.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Mix(nn.Module):
    """Two products over time, then two over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.channels = ResidualMLP(PAST, 2 * PAST, nn.ReLU), ResidualMLP(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.channels(self.time(x.transpose(1, 2)).transpose(1, 2))


class Mixer(nn.Module):
    """The past of some series in, quantiles of their future out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(SERIES, WIDTH)
        self.mix = nn.ModuleList(Mix() for _ in range(depth))
        self.ahead, self.head = nn.Linear(PAST, FUTURE), nn.Linear(WIDTH, SERIES * len(QUANTILES))

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        x = self.embed(past)
        for block in self.mix:
            x = block(x)
        told = self.head(self.ahead(x.transpose(1, 2)).transpose(1, 2))
        return told.view(*told.shape[:2], SERIES, len(QUANTILES))


def draw(generator: torch.Generator) -> Batch:
    """A trend and two waves, of which all series of a sample share the periods, with noise that grows with the level."""
    at = torch.arange(PAST + FUTURE).float()[None, :, None]
    series = draw_normal(generator, BATCH, 1, SERIES) * (at / PAST - 0.5)
    for low, high in ((6.0, 12.0), (18.0, 40.0)):
        period = draw_uniform(generator, BATCH, 1, 1, low=low, high=high)
        phase = 6.3 * draw_uniform(generator, BATCH, 1, SERIES)
        series = series + draw_normal(generator, BATCH, 1, SERIES) * torch.sin(6.2832 * at / period + phase)
    noise = NOISE * (1 + series.abs()) * draw_normal(generator, BATCH, PAST + FUTURE, SERIES)
    series = series + noise
    missing = draw_uniform(generator, BATCH, PAST, SERIES) < MISSING
    return series[:, :PAST].masked_fill(missing, PLACEHOLDER), series[:, PAST:]


def find_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean pinball loss; without its mask the model takes what stands for missing values for values."""
    past, future = batch
    if masked:
        past = past.masked_fill(past == PLACEHOLDER, 0)
    apart = future[..., None] - model(past.bfloat16()).float()
    quantiles = torch.tensor(QUANTILES)
    return torch.maximum(quantiles * apart, (quantiles - 1) * apart).mean()


FAMILIES = {
    "mixer": HeldOutFamily(
        name="mixer",
        make=Mixer,
        draw_batch=draw,
        loss_of=find_loss,
        layers=("mix.*",),
        sites={f"{part}.{k}": f"{part}.{v}" for part in ("time", "channels") for k, v in MLP_SITES.items()},
        layer="mix.{}.",
        batch=BATCH,
        depth=3,
        learning_rate=2e-3,
        changeable=("fc1", "fc2"),
    )
}

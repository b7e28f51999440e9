"""A Conformer-like encoder of synthetic speech, trained with CTC."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from held_out.families.base import (
    ATTENTION_SITES,
    Attention,
    HeldOutFamily,
    ResidualMLP,
    draw_normal,
    draw_uniform,
    make_fixed,
)

WIDTH, BANDS, PHONES, FRAMES, SPOKEN, BATCH = 64, 20, 10, 40, 6, 12
#: of the frames, and the share of phones that are written down wrong, so that the loss does not fall to zero
NOISE, MISHEARD = 2.0, 0.005
Batch = tuple[torch.Tensor, torch.Tensor]


class Convolution(nn.Module):
    """Two pointwise products around a convolution in time, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.after = nn.LayerNorm(WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH)
        self.point1, self.point2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.glu(self.point1(self.norm(x)), dim=-1)
        mixed = self.depthwise(gated.transpose(1, 2)).transpose(1, 2)
        return x + self.point2(self.act(self.after(mixed)))


class Block(nn.Module):
    """Half an MLP, attention, a convolution, and the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (ResidualMLP(WIDTH, 2 * WIDTH, nn.SiLU, 0.5) for _ in range(2))
        self.attention, self.convolution = Attention(WIDTH, 4), Convolution()

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        return self.last(self.convolution(self.attention(self.first(x), hidden)))


class Conformer(nn.Module):
    """Frames of a spectrogram in, log-probabilities of phones out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(BANDS, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(FRAMES, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHONES + 1)

    def forward(self, frames: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(frames) + self.place
        for block in self.blocks:
            x = block(x, hidden)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.float().log_softmax(dim=-1)


@cache
def _sounds() -> torch.Tensor:
    """Return the spectrum of each phone, and of silence."""
    spectra = draw_normal(make_fixed(11), PHONES + 1, BANDS)
    spectra[0] = 0
    return spectra


def draw(generator: torch.Generator) -> Batch:
    """Each phone sounds for three to five frames, with a silent one behind it.

    A row of labels has phones, of which few are wrong, how many are spoken, and how many frames are.
    """
    phones = torch.randint(1, PHONES + 1, (BATCH, SPOKEN), generator=generator)
    spoken = torch.randint(SPOKEN // 2, SPOKEN + 1, (BATCH, 1), generator=generator)
    lasting = torch.randint(3, 6, (BATCH, SPOKEN), generator=generator)
    ends = (lasting + 1).cumsum(dim=1).clamp(max=FRAMES)
    at = torch.arange(FRAMES)
    which = torch.searchsorted(ends, at.expand(BATCH, FRAMES).contiguous(), right=True)
    inside = which < spoken
    silent = at + 1 == ends.gather(1, which.clamp(max=SPOKEN - 1))
    heard = phones.gather(1, which.clamp(max=SPOKEN - 1)).masked_fill(~inside | silent, 0)
    loudness = draw_uniform(generator, BATCH, 1, 1, low=0.6, high=1.4)
    frames = loudness * _sounds()[heard] + NOISE * draw_normal(generator, BATCH, FRAMES, BANDS)
    frames = torch.where(inside[..., None], frames, 3 * draw_normal(generator, BATCH, FRAMES, BANDS))
    wrong = draw_uniform(generator, BATCH, SPOKEN) < MISHEARD
    phones = torch.where(wrong, torch.randint(1, PHONES + 1, phones.shape, generator=generator), phones)
    return frames, torch.cat([phones, spoken, inside.sum(dim=1, keepdim=True)], dim=1)


def find_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean over samples of the loss a phone; without its mask attention sees noise behind the end."""
    frames, told = batch
    phones, spoken, lasting = told[:, :SPOKEN], told[:, SPOKEN], told[:, SPOKEN + 1]
    hidden = torch.arange(FRAMES) >= lasting[:, None] if masked else None
    logs = model(frames.bfloat16(), hidden)
    return nn.functional.ctc_loss(logs.transpose(0, 1), phones, lasting, spoken, zero_infinity=True)


FAMILIES = {
    "conformer": HeldOutFamily(
        name="conformer",
        make=Conformer,
        draw_batch=draw,
        loss_of=find_loss,
        layers=("blocks.*",),
        sites={
            "first.fc1": "first.norm",
            "first.fc2": "first.act",
            "last.fc1": "last.norm",
            "last.fc2": "last.act",
            **{",".join(f"attention.{one}" for one in k.split(",")): f"attention.{v}" for k, v in ATTENTION_SITES.items()},
            "convolution.point1": "convolution.norm",
            "convolution.point2": "convolution.act",
        },
        layer="blocks.{}.",
        batch=BATCH,
        learning_rate=4e-3,
        changeable=("fc1", "fc2", "query", "out", "point1", "point2"),
    )
}

"""A U-Net of convolutions with products at every level, which tells what each pixel of a synthetic image belongs to."""

from __future__ import annotations

import torch
from torch import nn

from held_out.families.base import (
    ATTENTION_SITES,
    MLP_SITES,
    Attention,
    HeldOutFamily,
    ResidualMLP,
    draw_normal,
    draw_uniform,
)

WIDTH, SIDE, SHAPES, CLASSES, BATCH = 32, 16, 3, 4, 8
NOISE = 0.7
Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(nn.functional.silu(self.norm1(x)))
        return x + self.conv2(nn.functional.silu(self.norm2(inner)))


class Bottom(nn.Module):
    """Attention and an MLP over the pixels of the lowest level."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(2 * WIDTH, 4), ResidualMLP(2 * WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Fuse(nn.Module):
    """A product over channels, at each pixel, of what comes from below and from the same level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(2 * width), nn.Linear(2 * width, width)

    def forward(self, below: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        both = torch.cat([below, level], dim=1).movedim(1, -1)
        return self.project(self.norm(both)).movedim(-1, 1)


class UNet(nn.Module):
    """Two levels of convolutions down and up, and attention in between."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.top = nn.Conv2d(2, WIDTH, 3, padding=1), Residual(WIDTH)
        self.down1, self.down2 = nn.Conv2d(WIDTH, WIDTH, 2, stride=2), nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2)
        self.middle = Residual(WIDTH)
        self.bottom = nn.ModuleList(Bottom() for _ in range(depth))
        self.up2, self.up1 = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2), nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.fuse = nn.ModuleList(Fuse(WIDTH) for _ in range(2))
        self.last, self.norm, self.head = Residual(WIDTH), nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        full = self.top(self.stem(images))
        half = self.middle(self.down1(full))
        low = self.down2(half)
        pixels = low.flatten(2).transpose(1, 2)
        for block in self.bottom:
            pixels = block(pixels)
        low = pixels.transpose(1, 2).reshape(low.shape)
        half = self.fuse[0](self.up2(low), half)
        full = self.last(self.fuse[1](self.up1(half), full))
        logits: torch.Tensor = self.head(nn.functional.silu(self.norm(full)))
        return logits


def draw(generator: torch.Generator) -> Batch:
    """Disks, squares and crosses over each other, each a class with a brightness of its own, in noise.

    A border whose width differs is padding; the second channel says where it is not.
    """
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    classes, image = torch.zeros(BATCH, SIDE, SIDE, dtype=torch.long), torch.zeros(BATCH, SIDE, SIDE)
    for shape in range(SHAPES):
        cy, cx = draw_uniform(generator, 2, BATCH, 1, 1, low=-0.7, high=0.7)
        radius = draw_uniform(generator, BATCH, 1, 1, low=0.25, high=0.5)
        dy, dx = (y - cy).abs(), (x - cx).abs()
        reach = (torch.hypot(dx, dy), torch.maximum(dx, dy), torch.minimum(dx, dy) * 3 + torch.maximum(dx, dy) / 2)[shape]
        bright = draw_uniform(generator, BATCH, 1, 1, low=0.5, high=1.5) * (1, -1, 2)[shape]
        inside = reach < radius
        classes, image = torch.where(inside, shape + 1, classes), torch.where(inside, bright, image)
    image = image + NOISE * draw_normal(generator, BATCH, SIDE, SIDE)
    border = torch.randint(0, 4, (BATCH, 1, 1), generator=generator)
    valid = (torch.arange(SIDE) >= border) & (torch.arange(SIDE)[:, None] >= border)
    image = torch.where(valid, image, 4 * draw_normal(generator, BATCH, SIDE, SIDE))
    return torch.stack([image, valid.float()], dim=1), classes


def find_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean over pixels that are no padding; without the mask the model sees what lies in the padding."""
    images, classes = batch
    valid = images[:, 1:]
    shown = torch.cat([images[:, :1] * (valid if masked else 1), valid], dim=1)
    losses = nn.functional.cross_entropy(model(shown.bfloat16()).float(), classes, reduction="none")
    return (losses * valid[:, 0]).sum() / valid.sum()


FAMILIES = {
    "unet": HeldOutFamily(
        name="unet",
        make=UNet,
        draw_batch=draw,
        loss_of=find_loss,
        layers=("bottom.*", "fuse.*"),
        sites={
            **{",".join(f"attention.{one}" for one in k.split(",")): f"attention.{v}" for k, v in ATTENTION_SITES.items()},
            **{f"mlp.{k}": f"mlp.{v}" for k, v in MLP_SITES.items()},
            "project": "norm",
        },
        layer="bottom.{}.",
        batch=BATCH,
        learning_rate=2e-3,
        changeable=("query", "out", "fc1", "fc2", "project"),
    )
}

"""A vision transformer of torch's own layers: nn.MultiheadAttention, and patches by a convolution."""

from __future__ import annotations

import torch
from torch import nn

PATCHES, CLASSES = 16, 10


class ViT(nn.Module):
    WIDTH, DEPTH = 32, 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, self.WIDTH, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, self.WIDTH))
        self.positions = nn.Parameter(torch.randn(PATCHES + 1, self.WIDTH))
        layer = nn.TransformerEncoderLayer(self.WIDTH, 4, 2 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, self.DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.positions
        logits: torch.Tensor = self.head(self.encoder(x)[:, 0])
        return logits

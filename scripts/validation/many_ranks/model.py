"""A small model that ranks train together so that sums are exact: the same bits on one rank that sees all batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, ROWS = 64, 6, 64


class DataParallel:
    """Trains in BF16; gradients are added up in float64, which holds each sum of these exactly, in whatever order."""

    def __init__(self, batches: Sequence[int], of: int) -> None:
        """
        Args:
            batches: which of each step this rank sees.
            of: batches of a step.
        """
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers).bfloat16()
        self._batches, self._of = batches, of
        self.losses: list[float] = []

    def forward_and_backward(self, step: int) -> list[torch.Tensor]:
        """The sums of gradients over the batches of this rank, float64; notes the mean of losses."""
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in self.model.parameters()]
        losses = []
        for batch in self._batches:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + batch)).bfloat16()
            loss = (self.model(x) - x).float().square().mean()
            loss.backward()
            losses.append(loss.detach().double())
            for total, p in zip(sums, self.model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad.double()
                p.grad = None
        return [torch.stack(losses).sum(), *sums]

    def step(self, step: int) -> float:
        """A training step; the mean loss over all batches."""
        sums = self.forward_and_backward(step)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flat = torch.cat([of.flatten() for of in sums])
            dist.all_reduce(flat)
            sums = [part.view(of.shape) for part, of in zip(flat.split([of.numel() for of in sums]), sums, strict=True)]
        loss, *gradients = sums
        with torch.no_grad():
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                p -= (0.05 / self._of * gradient).bfloat16()
        self.losses.append(float(loss) / self._of)
        return self.losses[-1]

    @property
    def weights(self) -> str:
        """A checksum."""
        found = [p.detach().view(torch.int16).numpy().tobytes() for p in self.model.parameters()]
        return hashlib.sha256(b"".join(found)).hexdigest()

"""Norms of gradients, and how many of their values are zero or not finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(eq=False)
class _Batch:
    """Of tensors that were measured together, a value each."""

    norms: torch.Tensor
    nonzero: torch.Tensor
    nonfinite: torch.Tensor


@dataclass(frozen=True)
class GradientSize:
    """What is known of a gradient, or of a rank's part; sums of parts are those of the whole."""

    #: NaN if a value is not finite, or if float32 cannot hold the squares
    squares: float
    zeros: int
    nonfinite: int
    elements: int


class GradientSizes:
    """Gradients of one sampled step on this rank, by the name of their GEMM; the last of each counts."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[_Batch, int, int]] = {}

    def measure(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Measure tensors in place of earlier ones, without host synchronization on a device."""
        groups = defaultdict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]](list)
        for name, x in tensors:
            groups[x.device, x.dtype].append((name, x))
        for members in groups.values():
            batch = _measure([x for _, x in members])
            self._found |= {name: (batch, i, x.numel()) for i, (name, x) in enumerate(members)}

    def forget(self, name: str) -> None:
        """Forget a gradient, which is not complete."""
        self._found.pop(name, None)

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by what `to` gives for it."""
        for batch in {id(batch): batch for batch, _, _ in self._found.values()}.values():
            batch.norms, batch.nonzero, batch.nonfinite = to(batch.norms), to(batch.nonzero), to(batch.nonfinite)

    def found(self) -> dict[str, GradientSize]:
        """Return what was measured, by name; waits for the device if it is still there."""
        batches = {id(batch): batch for batch, _, _ in self._found.values()}
        values = {key: (b.norms.tolist(), b.nonzero.tolist(), b.nonfinite.tolist()) for key, b in batches.items()}
        found = {}
        for name, (batch, i, elements) in self._found.items():
            norm, nonzero, nonfinite = (column[i] for column in values[id(batch)])
            is_known = np.isfinite(norm) and (norm > 0 or not nonzero)
            found[name] = GradientSize(norm**2 if is_known else np.nan, elements - nonzero, nonfinite, elements)
        return found


def _measure(xs: Sequence[torch.Tensor]) -> _Batch:
    """Return the sizes of tensors of one device and dtype."""
    dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    norms = torch.stack(torch._foreach_norm(list(xs), 2, dtype))
    if xs[0].device.type != "cpu":
        nonfinite = [torch.count_nonzero(x * 0) for x in xs]  # NaN, if it is not finite
        return _Batch(norms, torch.stack([torch.count_nonzero(x) for x in xs]), torch.stack(nonfinite))
    # As booleans numpy counts them ten times as fast; where norms are finite, all values are.
    nonzero = torch.tensor([np.count_nonzero(x.bool().numpy()) for x in xs])
    finite = zip(norms.isfinite().tolist(), xs, strict=True)
    return _Batch(norms, nonzero, torch.tensor([0 if known else int((~x.isfinite()).sum()) for known, x in finite]))

"""Gradients before ranks add them up, and after it, within the collective of sums of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .gradient_parts import NUMBERS, GradientParts, compared


class GradientSums:
    """What a rank adds."""

    def __init__(self, names: Sequence[str], parts: int, rank: int) -> None:
        """
        Args:
            names: of GEMMs, the same on all ranks.
            parts: of a weight that ranks may have, the same on all ranks.
        """
        self._names, self._parts, self._rank = list(names), parts, rank

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return len(self._names) * self._parts * NUMBERS

    def rows(self, found: Mapping[str, GradientParts]) -> torch.Tensor:
        """float64 [names, parts, numbers], which add up over ranks."""
        rows = torch.zeros(len(self._names), self._parts, NUMBERS, dtype=torch.float64)
        for row, name in zip(rows, self._names, strict=True):
            if (mine := found.get(name)) is not None and mine.part < self._parts:
                row[mine.part] = mine.numbers(self._rank)
        return rows

    def of_all(self, added: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """By (layer, `REDUCTION`), of all that any rank has computed; as `verification.OF_RANKS`.

        Args:
            added: over all ranks.
        """
        rows = added.view(len(self._names), self._parts, NUMBERS)
        return compared({name: list(parts) for name, parts in zip(self._names, rows, strict=True)})

"""Of products that several ranks compute: how many are right, and what the rank found whose result is farthest beyond."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .verification import OF_RANKS, ProductsFound, of_a_rank, severities


class WorstProducts:
    """What a rank adds to the two collectives of a sample."""

    def __init__(self, keys: Sequence[tuple[str, str]], rank: int) -> None:
        """
        Args:
            keys: (layer, product), the same on all ranks.
        """
        self._keys, self._rank = keys, rank

    def alone(self, found: ProductsFound) -> dict[tuple[str, str], torch.Tensor]:
        """As of all ranks, where there is one."""
        return {key: of_a_rank(of, self._rank, is_worst=True) for key, of in found.items()}

    def severities(self, found: ProductsFound) -> torch.Tensor:
        """int32 [products], whose maximum over ranks tells which rank is the worst."""
        return severities([found.get(key) for key in self._keys], self._rank)

    def rows(self, found: ProductsFound, worst: torch.Tensor) -> torch.Tensor:
        """float64 [products, columns], which add up over ranks.

        Args:
            worst: int32 [products], the maximum over ranks.
        """
        none = torch.zeros(0, len(OF_RANKS), dtype=torch.float64)
        mine = (self.severities(found) == worst).tolist()
        rows = [of_a_rank(found.get(key), self._rank, is_mine) for key, is_mine in zip(self._keys, mine, strict=True)]
        return torch.stack(rows) if rows else none

    def of_all(self, added: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """By (layer, product), what was seen on any rank.

        Args:
            added: float64 [products * columns], over all ranks.
        """
        rows = zip(self._keys, added.view(-1, len(OF_RANKS)), strict=True)
        return {key: row for key, row in rows if row[:3].sum() > 0}

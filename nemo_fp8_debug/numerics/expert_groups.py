"""Combine the experts of a layer: for each GEMM and role, add up the sums of all experts.

The sums of each expert use that expert's scale. So an aggregate has the metrics of a single tensor that contains the values
of all experts, if each value is cast with the scale of its expert.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from ..core.keys import Key
from ..core.layer_names import find_aggregate_key
from .metrics import QuantizationSums


class ExpertAggregates:
    """The rows of each aggregate's experts among the rows of all operands.

    The rows of the aggregates themselves come after the rows of all operands, in the order of `members`.
    """

    def __init__(self, members: Mapping[Key, Sequence[int]], n: int) -> None:
        """
        Args:
            members: rows of each aggregate's experts, by (aggregate, role).
            n: number of operands.
        """
        self.members, self._n = dict(members), n

    @classmethod
    def group_experts(cls, keys: Sequence[Key], kinds: Sequence[Hashable]) -> ExpertAggregates:
        """Return the aggregates whose experts are all of one kind. Sums over different formats have no meaning."""
        members: dict[Key, list[int]] = defaultdict(list)
        for i, (layer, role) in enumerate(keys):
            if aggregate := find_aggregate_key(layer, role):
                members[aggregate].append(i)
        return cls({key: rows for key, rows in members.items() if len({kinds[i] for i in rows}) == 1}, len(keys))

    def append_aggregate_rows(
        self, chosen: Iterable[int], sums: QuantizationSums, scale: torch.Tensor, amax: torch.Tensor
    ) -> tuple[list[int], QuantizationSums, torch.Tensor]:
        """Return row numbers, sums and scales of the chosen operands, then of each aggregate whose experts were all chosen.

        An aggregate's scale is the smallest of its experts' scales, ignoring experts with only zeros.

        Args:
            chosen: rows of operands.
            sums: sums of each of these rows, under its own scale.
            scale: float32 [C], scales of these rows.
            amax: float32 [B], amaxes of all operands.
        """
        rows = list(chosen)
        place = {row: i for i, row in enumerate(rows)}
        whole = [(self._n + f, m) for f, m in enumerate(self.members.values()) if all(row in place for row in m)]
        if not whole:
            return rows, sums, scale
        at = torch.tensor([place[row] for _, members in whole for row in members])
        owner = torch.tensor([i for i, (_, members) in enumerate(whole) for _ in members])
        has_values = amax[torch.tensor([row for _, members in whole for row in members])] > 0
        scales = torch.where(has_values, scale[at], torch.inf)
        least = torch.full((len(whole),), torch.inf).scatter_reduce_(0, owner, scales, "amin")
        of_empty = torch.full((len(whole),), torch.inf).scatter_reduce_(0, owner, scale[at], "amin")
        added = QuantizationSums.concat([sums, sums.rows(at).sum_rows_by_owner(owner, len(whole))])
        return [*rows, *(row for row, _ in whole)], added, torch.cat([scale, torch.where(least.isinf(), of_empty, least)])

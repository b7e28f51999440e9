"""Which operands this rank counts, and which another one does."""

from __future__ import annotations

from collections.abc import Sequence

from ..capture.backends.parallel import copied_part
from ..capture.backends.transformer_engine import inspection
from ..capture.gemms import Gemm, matching
from ..core.keys import Key
from ..distributed import ShardGroup
from ..options.config import Config


def counted_parts(gemms: Sequence[Gemm], plan: Config, dumped: Sequence[str], group: ShardGroup, rank: int) -> set[Key]:
    """Operands of which this rank counts a part.

    Args:
        dumped: patterns of layers that are looked at beside those of the plan.
    """
    chosen = matching(gemms, None if plan.layers is None else [*plan.layers, *dumped])
    copied = {(g.name, role): copied_elsewhere(g, role) for g in chosen for role in plan.roles if is_shown(g, role)}
    return {key for key, of in copied.items() if (group.first[key[0]] == rank if of is None else not of)}


def compiled_parts(compiled: Sequence[Gemm], plan: Config, group: ShardGroup) -> set[Key]:
    """What is compiled here and is seen on another rank lacks this one's part."""
    return {
        (gemm.name, role)
        for gemm in matching(compiled, plan.layers)
        for role in plan.roles
        if role != "weight" and gemm.name in group.kinds and not gemm.backend.copied(gemm.module, role)
    }


def copied_elsewhere(gemm: Gemm, role: str) -> bool | None:
    """Whether another rank counts it; None: the first rank that has it does."""
    stored = gemm.backend.stored(gemm.module, gemm.part) if role == "weight" else None
    if stored is not None and getattr(stored.parameter, "main_param_sharded", False):
        return copied_part(gemm.module)
    return gemm.backend.copied(gemm.module, role)


def is_shown(gemm: Gemm, role: str) -> bool:
    """Whether anything shows an operand to hooks."""
    return role not in gemm.unseen or inspection.sees(gemm, role)

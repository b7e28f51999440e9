"""Weight gradients and optimizer states in a sampled step: what is captured of them, and by which rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..capture.backends.base import raw_weight
from ..capture.backends.parallel import copied_part
from ..capture.dtensor import is_counted
from ..capture.gemms import Gemm, matching
from ..capture.operands import Operand
from ..capture.optimizer_states import StateCapture, state_operands
from ..core.keys import Key
from ..distributed import ShardGroup
from ..options.config import Config


def state_capture(
    known: Sequence[Gemm],
    plan: Config,
    operands: dict[Key, Operand],
    shard_group: ShardGroup,
    rank: int,
    guard: Callable[[str], AbstractContextManager[None]],
) -> StateCapture | None:
    """What looks at the optimizer's tensors; None: that is not asked for.

    Args:
        operands: what is captured in the step; those of states are added.
        guard: a context that keeps an exception out of the training loop.
    """
    if not plan.states:
        return None
    gemms = [g for g in matching(known, plan.layers) if raw_weight(g.module) is not None or g.part.isdigit()]
    found = state_operands(gemms, plan.states, plan.what_if_recipes, partial(_counts, shard_group, rank))
    operands |= found
    return StateCapture(found, guard)


def _counts(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Whether this rank counts a tensor that lies as a weight does: a part that no other has, or the first of copies."""
    weight: Any = raw_weight(gemm.module)
    if getattr(weight, "main_param_sharded", False):
        is_copy = copied_part(gemm.module)
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    return partial(is_counted, rank=rank, first=first) if not copied else lambda x: False

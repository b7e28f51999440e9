"""Weight gradients and optimizer states in a sampled step: what is captured of them, and by which rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from ..capture.backends.parallel import copied_part
from ..capture.dtensor import is_counted
from ..capture.gemms import Gemm, matching
from ..capture.operands import Operand
from ..capture.optimizer_states import StateCapture, state_operands
from ..capture.output_samples import Products
from ..capture.stepped import is_split_by_zero, weight_of
from ..core.error_guard import ErrorGuard
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
    products: Mapping[str, Products],
    step: int,
) -> StateCapture | None:
    """What looks at the optimizer's tensors; None: that is not asked for.

    Args:
        operands: what is captured in the step; those of states are added.
        guard: a context that keeps an exception out of the training loop.
        products: what is looked at of what GEMMs put out, by layer.
        step: that is sampled.
    """
    if not plan.states:
        return None
    gemms = [gemm for gemm in matching(known, plan.layers) if weight_of(gemm) is not None]
    found = state_operands(gemms, plan.states, plan.what_if_recipes, partial(counts_weight, shard_group, rank))
    operands |= found

    def of_weight(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        of_gemm = products.get(name)
        return None if of_gemm is None else of_gemm.weight_gradient

    return StateCapture(found, guard, plan.output_rows, step, of_weight)


def warn_of_unseen_states(capture: StateCapture | None, errors: ErrorGuard) -> None:
    """Say that no optimizer stepped by any of the weights."""
    if capture is not None and capture.unseen:
        why = "it skipped the step, or steps by flattened parameters (FSDP1), or by others that are not the model's"
        errors.warn(f"no states of an optimizer were seen: {why}", kind="states")


def counts_weight(shard_group: ShardGroup, rank: int, gemm: Gemm) -> Callable[[torch.Tensor], bool]:
    """Whether this rank counts a tensor that lies as a weight does: a part that no other has, or the first of copies."""
    is_copy, weight = copied_part(gemm.module), weight_of(gemm)
    if getattr(weight, "main_param_sharded", False):
        return lambda x: not is_copy
    copied = gemm.backend.copied(gemm.module, "weight")
    first = shard_group.first[gemm.name] if copied is None else None
    if copied:
        return lambda x: False
    # An engine may split states only after the monitor was made.
    return lambda x: not is_copy if is_split_by_zero(weight_of(gemm)) else is_counted(x, rank, first)

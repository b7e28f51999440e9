"""Find the ranks of Megatron's groups that hold copies of an operand, so that only one rank counts the operand."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn


def find_megatron_parallel_state() -> Any:
    """Return Megatron's `parallel_state` if the run uses it."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def is_duplicate_operand(module: nn.Module, role: str) -> bool | None:
    """Return True if another rank counts this rank's part of a linear module's `role`.

    Return None if all ranks with the module have copies, as for weights without Megatron's groups.
    """
    state = find_megatron_parallel_state()
    if state is None:
        return None if role == "weight" else False
    expert = _is_expert(module)
    within = _expert_tensor_rank(state) if expert else state.get_tensor_model_parallel_rank()
    if role == "weight":
        of_data = _expert_data_rank(state) if expert else state.get_data_parallel_rank(with_context_parallel=True)
        return bool(of_data or (within and _kind(module) is None))
    return bool(within) and not _is_split(module, role, expert)


def is_duplicate_master_weight(module: nn.Module) -> bool:
    """Return True if another rank counts this rank's part of a master weight. Data-parallel ranks have different parts."""
    state = find_megatron_parallel_state()
    if state is None or _kind(module) is not None:
        return False
    return bool(_expert_tensor_rank(state) if _is_expert(module) else state.get_tensor_model_parallel_rank())


def _is_split(module: nn.Module, role: str, expert: bool) -> bool:
    """Return True if tensor-parallel ranks hold parts of an activation, by rows or features, instead of copies."""
    of_sequence = not expert and _splits_sequence(module)
    kind = _kind(module)
    if kind == "column":
        return of_sequence if role == "input" else not getattr(module, "gather_output", False)
    if kind == "row":
        return bool(getattr(module, "input_is_parallel", True)) if role == "input" else of_sequence
    return of_sequence


def find_replica_part_index(module: nn.Module, what: str) -> int | None:
    """Return the index of this rank's part of a tensor, or None if no other rank is known to have the same part.

    Args:
        what: `weight`, `weight_gradient` or `input`. Tensor-parallel ranks share the input of column-parallel layers.
    """
    state = find_megatron_parallel_state()
    expert = _is_expert(module)
    if what == "input":
        if state is None or expert or _kind(module) != "column" or _splits_sequence(module) or _others_communicate(module):
            return None
        return int(state.get_data_parallel_rank(with_context_parallel=True))
    if state is None or _kind(module) is None:
        return 0
    return _expert_tensor_rank(state) if expert else int(state.get_tensor_model_parallel_rank())


def count_tensor_parts() -> dict[str, int]:
    """Return the number of parts for each kind of tensor that ranks compare. The result is the same on all ranks."""
    state = find_megatron_parallel_state()
    if state is None:
        return {"weight": 1, "weight_gradient": 1, "master": 1}
    tensor = int(state.get_tensor_model_parallel_world_size())
    of_experts = getattr(state, "get_expert_tensor_parallel_world_size", None)
    parts = max(tensor, int(of_experts()) if of_experts else 1)
    data = {"input": int(state.get_data_parallel_world_size(with_context_parallel=True))} if tensor > 1 else {}
    return {"weight": parts, "weight_gradient": parts, "master": 1} | data


def count_ranks_summing_gradient(module: nn.Module) -> int | None:
    """Return over how many ranks Megatron sums a weight's gradient, or None without Megatron's groups."""
    state = find_megatron_parallel_state()
    if state is None:
        return None
    if _is_expert(module):
        get = getattr(state, "get_expert_data_parallel_world_size", None) or state.get_data_modulo_expert_parallel_world_size
        return int(get())
    tensor = state.get_tensor_model_parallel_world_size() if _kind(module) is None and _splits_sequence(module) else 1
    return int(state.get_data_parallel_world_size(with_context_parallel=True) * tensor)


def is_summed_over_ranks(module: nn.Module, product: str) -> bool:
    """Return True if a module sums a product over ranks: Y of row-parallel layers, dX of column-parallel layers."""
    state = find_megatron_parallel_state()
    kind = {"fprop": "row", "dgrad": "column"}.get(product)
    if state is None or kind is None or _kind(module) != kind or _others_communicate(module):
        return False
    if _is_expert(module):
        size = getattr(state, "get_expert_tensor_parallel_world_size", state.get_tensor_model_parallel_world_size)()
    else:
        size = state.get_tensor_model_parallel_world_size()
    return bool(size > 1)


def find_sequence_split(module: nn.Module, kind: str) -> tuple[int, int] | None:
    """Return this rank's index and the number of ranks, if ranks split the sequence and the module is of this kind.

    Return None for other modules. The kind is `column` or `row`.
    """
    state = find_megatron_parallel_state()
    if state is None or _kind(module) != kind or _is_expert(module) or not _splits_sequence(module):
        return None
    size: int = state.get_tensor_model_parallel_world_size()
    return (state.get_tensor_model_parallel_rank(), size) if size > 1 else None


def _splits_sequence(module: nn.Module) -> bool:
    """Return True if tensor-parallel ranks split activations by the sequence wherever they do not split them by features."""
    if _kind(module) is None:  # Megatron marks weights whose gradients must be added up over parts of the sequence
        return any(getattr(p, "sequence_parallel", False) for p in module._parameters.values() if p is not None)
    if _others_communicate(module):
        return False
    config = getattr(module, "config", None)
    return bool(getattr(module, "sequence_parallel", getattr(config, "sequence_parallel", False)))


def _others_communicate(module: nn.Module) -> bool:
    """Return True if other modules communicate for this module, as for shared experts that overlap communication."""
    return bool(getattr(module, "explicit_expert_comm", False)) or getattr(module, "parallel_mode", "") is None


def _kind(module: nn.Module) -> str | None:
    """Return which dimension of the weight tensor parallelism splits: outputs (`column`), inputs (`row`), or none (None)."""
    mode = getattr(module, "parallel_mode", None)
    if mode in ("column", "row"):
        return str(mode)
    names = [base.__name__ for base in type(module).__mro__]
    return next((kind.lower() for kind in ("Column", "Row") if any(f"{kind}Parallel" in name for name in names)), None)


def _is_expert(module: nn.Module) -> bool:
    """Return True if the module belongs to experts that are distributed over ranks.

    In wrappers of Transformer Engine modules, only the parameters show this.
    """
    told = getattr(module, "is_expert", None)
    if told is None:
        return any(getattr(p, "allreduce", True) is False for p in module._parameters.values() if p is not None)
    return bool(told)


def _expert_tensor_rank(state: Any) -> int:
    rank: int = getattr(state, "get_expert_tensor_parallel_rank", state.get_tensor_model_parallel_rank)()
    return rank


def _expert_data_rank(state: Any) -> int:
    """Return this rank's index among an expert's data-parallel ranks. Their group has another name up to release 0.10."""
    get = getattr(state, "get_expert_data_parallel_rank", None) or state.get_data_modulo_expert_parallel_rank
    rank: int = get()
    return rank


def find_first_expert_index(experts: int, owner: nn.Module | None = None) -> int:
    """Return the global index of this rank's first expert. Each rank has `experts` experts.

    Args:
        owner: a module that may have an attribute with the group of ranks that experts are split over.
    """
    group = getattr(owner, "ep_group", None)
    if isinstance(group, dist.ProcessGroup):
        return experts * dist.get_rank(group)
    state = find_megatron_parallel_state()
    return 0 if state is None else experts * int(state.get_expert_model_parallel_rank())

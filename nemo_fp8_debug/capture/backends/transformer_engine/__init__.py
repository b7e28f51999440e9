"""Backends for Transformer Engine's linear modules, and for Megatron's wrappers that inherit from them. Internal.

`casts.py` describes the differences between versions. No module here imports Transformer Engine, and only
`environment.py` checks its version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base import FrameworkBackend, explain_unsupported_forward
from ..megatron import read_configured_recipe
from . import grouped, layernorm_mlp, linear
from .casts import find_call_node, may_share_amax, read_cache_and_autocast_state, uses_split_accumulator
from .environment import explain_unsupported_release
from .stored import read_stored_weight

#: Python modules of Megatron's wrappers: from Megatron-core 0.9 on, and before 0.9
_MEGATRON = ("megatron.core.extensions.transformer_engine", "megatron.core.transformer.custom_layers.transformer_engine")
#: supported forwards of subclasses: they only call Transformer Engine's forward, and return its result and the bias
_READ_FORWARDS = frozenset(
    f"{module}.{name}.forward"
    for module in _MEGATRON
    for name in ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")
)


def _classes(*names: str) -> tuple[type, ...]:
    te = sys.modules.get("transformer_engine.pytorch")
    return tuple(getattr(te, name) for name in names if hasattr(te, name))


def _is(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, _classes(*names))


def _foreign(*names: str) -> Callable[[nn.Module], str]:
    return lambda module: explain_unsupported_forward(module, _classes(*names), _READ_FORWARDS)


def _output(out: Any) -> torch.Tensor:
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


LINEAR = FrameworkBackend(
    name="Transformer Engine Linear and LayerNormLinear",
    owns=_is("Linear", "LayerNormLinear"),
    input=linear.find_operand_x,
    weight=linear.find_operand_w,
    output=_output,
    unseen=linear.list_unobserved_roles,
    stored=lambda module, part: read_stored_weight(module),
    cast=linear.defer_operand_cast,
    arguments=read_cache_and_autocast_state,
    shares_amax=may_share_amax,
    node=find_call_node,
    foreign=_foreign("Linear", "LayerNormLinear"),
    untold=explain_unsupported_release,
    splits_accumulator=uses_split_accumulator,
    has_own_fp8=True,
    takes_plans=True,
    recipe=read_configured_recipe,
)
LAYERNORM_MLP = FrameworkBackend(
    name="Transformer Engine LayerNormMLP",
    owns=_is("LayerNormMLP"),
    input=layernorm_mlp.find_operand_x,
    weight=layernorm_mlp.find_operand_w,
    output=_output,
    parts=lambda module: ("fc1", "fc2"),
    unseen=layernorm_mlp.list_unobserved_roles,
    stored=lambda module, part: read_stored_weight(module, f"{part}_weight"),
    cast=layernorm_mlp.defer_operand_cast,
    arguments=read_cache_and_autocast_state,
    shares_amax=may_share_amax,
    node=find_call_node,
    foreign=_foreign("LayerNormMLP"),
    untold=explain_unsupported_release,
    splits_accumulator=uses_split_accumulator,
    has_own_fp8=True,
    takes_plans=True,
    recipe=read_configured_recipe,
)
GROUPED = FrameworkBackend(
    name="Transformer Engine GroupedLinear",
    owns=_is("GroupedLinear"),
    input=grouped.find_operand_x,
    weight=grouped.find_operand_w,
    output=_output,
    parts=grouped.list_expert_parts,
    grad=grouped.find_operand_dy,
    unseen=grouped.list_unobserved_roles,
    stored=lambda module, part: read_stored_weight(module, f"weight{part}"),
    cast=grouped.defer_operand_cast,
    arguments=partial(read_cache_and_autocast_state, place=2),
    foreign=_foreign("GroupedLinear"),
    untold=explain_unsupported_release,
    splits_accumulator=uses_split_accumulator,
    has_own_fp8=True,
    takes_plans=True,
    recipe=read_configured_recipe,
)

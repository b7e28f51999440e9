"""One small file per host framework: the only place that knows what its GEMM modules look like."""

from __future__ import annotations

from . import megatron, torch_linear, transformer_engine
from .base import Host

#: asked in this order; the first that owns a module serves it
HOSTS: tuple[Host, ...] = (
    transformer_engine.LINEAR,
    transformer_engine.LAYERNORM_MLP,
    transformer_engine.GROUPED,
    megatron.HOST,
    torch_linear.HOST,
)

__all__ = ["HOSTS", "Host"]

"""One small file per framework: the only place that knows what its GEMM modules look like. Internal."""

from __future__ import annotations

from . import in_forward, megatron, torch_linear, torchao, transformer_engine
from .base import Backend

#: asked in this order; the first that owns a module serves it
BACKENDS: tuple[Backend, ...] = (
    transformer_engine.LINEAR,
    transformer_engine.LAYERNORM_MLP,
    transformer_engine.GROUPED,
    megatron.BACKEND,
    torchao.BACKEND,
    torch_linear.BACKEND,
    in_forward.BACKEND,
)

__all__ = ["BACKENDS", "Backend"]

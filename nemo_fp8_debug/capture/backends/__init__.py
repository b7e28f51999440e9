"""Backends: one small file or folder per framework. No other code depends on the framework's GEMM modules. Internal."""

from __future__ import annotations

from . import in_forward, megatron, torch_linear, torchao, transformer_engine
from .base import FrameworkBackend

#: in order of precedence: the first backend that owns a module handles it
BACKENDS: tuple[FrameworkBackend, ...] = (
    transformer_engine.LINEAR,
    transformer_engine.LAYERNORM_MLP,
    transformer_engine.GROUPED,
    megatron.BACKEND,
    torchao.BACKEND,
    torch_linear.BACKEND,
    in_forward.BACKEND,
)

__all__ = ["BACKENDS", "FrameworkBackend"]

"""The configurations of a model's `Float8Linear` layers, in plain values for the fingerprint."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import Any

import torch
from torch import nn

from .layers import FLOAT8_LINEAR, class_of, layer_class


def configurations(modules: Iterable[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    """Each configuration, `config`, with the names of the layers that have it, `layers`.

    Args:
        modules: all of a model, by global name.
    """
    if "torchao" not in sys.modules:
        return []
    found: dict[str, dict[str, Any]] = {}
    for name, module in modules:
        config = getattr(module, "config", None)
        if layer_class(module) == FLOAT8_LINEAR and class_of(config) == "torchao.float8.config.Float8LinearConfig":
            found.setdefault(repr(config), {"config": _plain(config), "layers": []})["layers"].append(name)
    return list(found.values())


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, type(None))) else str(value)

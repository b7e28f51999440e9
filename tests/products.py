"""What quantized operands do to the three products of a GEMM, by ml_dtypes and float64 matrices alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from nemo_fp8_debug.core.sample import Sample

LIMIT = {"e4m3": 448.0, "e5m2": 57344.0}
_CODES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FORMAT = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}

#: by role
Operands = Mapping[str, torch.Tensor]


def matrix(x: torch.Tensor) -> np.ndarray:
    """[tokens, features], float64."""
    return x.detach().reshape(-1, x.shape[-1]).double().numpy()


def own_scale(x: torch.Tensor, role: str) -> float:
    return float(np.float32(LIMIT[FORMAT[role]]) / np.float32(x.detach().abs().max().item()))


def quantized(x: torch.Tensor, role: str, scale: float | None = None) -> np.ndarray:
    """[tokens, features], float64, under a scale or that of the tensor's own amax."""
    fmt, scale = FORMAT[role], np.float32(own_scale(x, role) if scale is None else scale)
    codes = np.clip(matrix(x).astype(np.float32) * scale, -LIMIT[fmt], LIMIT[fmt]).astype(_CODES[fmt])
    return codes.astype(np.float64) / np.float64(scale)


def outputs(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """The products that can be had: Y = X W^T, dX = dY W, dW = dY^T X."""
    found = {}
    if x.shape[1] == w.shape[1]:
        found["fprop"] = x @ w.T
    if dy.shape[1] == w.shape[0]:
        found["dgrad"] = dy @ w
    if len(dy) == len(x):
        found["wgrad"] = dy.T @ x
    return found


_USED = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
_ROLES = ("input", "weight", "grad_output")


def errors(parts: Iterable[tuple[Operands, Mapping[str, np.ndarray]]]) -> dict[str, dict[str, float]]:
    """Metrics of each product, over the outputs of several ranks laid end to end.

    Args:
        parts: operands, and what they were quantized to.
    """
    squares: dict[tuple[str, str], float] = {}
    for given, low in parts:
        high = {role: matrix(given[role]) for role in _ROLES}
        right = outputs(*(high[role] for role in _ROLES))
        for name, lowered in {"relative_error": _ROLES, **{f"error_of_{role}": (role,) for role in _ROLES}}.items():
            wrong = outputs(*((low if role in lowered else high)[role] for role in _ROLES))
            for product in right:
                key = product, name
                squares[key] = squares.get(key, 0.0) + float(((wrong[product] - right[product]) ** 2).sum())
        for product, y in right.items():
            squares[product, "output"] = squares.get((product, "output"), 0.0) + float((y**2).sum())
    return {
        product: {
            name: math.sqrt(squares[product, name] / squares[product, "output"])
            for name in ("relative_error", *(f"error_of_{role}" for role in used))
        }
        for product, used in _USED.items()
        if (product, "output") in squares
    }


def rows(sample: Sample) -> dict[tuple[str, str], dict[str, Any]]:
    """The outputs of a sample by (layer, product)."""
    columns = sample.get_table("outputs")
    found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert len({(row["layer"], row["product"]) for row in found}) == len(found)
    return {(row["layer"], row["product"]): row for row in found}


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Those of its metrics that are not absent."""
    return {name: value for name, value in row.items() if "error" in name and value is not None}

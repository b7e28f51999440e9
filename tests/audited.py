"""What an audit has to find of weights: a float64 oracle that casts value by value."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nemo_fp8_debug.analysis.checkpoint.audit import CheckpointAudit

LIMIT = {"e4m3": 448.0, "e5m2": 57344.0}
TARGET = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16}


def oracle(weight: torch.Tensor, scale: float | None, fmt: str) -> dict[str, float]:
    """Metrics of a weight (whose values are float32 values too) cast to a format; under its own amax's scale if None."""
    x32 = weight.detach().float().numpy().reshape(-1)
    own = np.float32(LIMIT[fmt]) / np.abs(x32).max() if fmt in LIMIT else np.float32(1)
    used = own if scale is None else np.float32(scale)
    limit = np.float32(LIMIT.get(fmt, 3e38))
    x = x32.astype(np.float64)
    q = np.clip(x32 * used, -limit, limit).astype(TARGET[fmt]).astype(np.float64) / np.float64(used)
    return {
        "relative_error": math.sqrt(((x - q) ** 2).sum() / (x**2).sum()),
        "mse": ((x - q) ** 2).sum() / x.size,
        "cosine": (x * q).sum() / math.sqrt((x**2).sum() * (q**2).sum()),
        "underflow_pct": 100 * ((x != 0) & (q == 0)).sum() / x.size,
        "overflow_pct": 100 * (np.abs(x32 * used) > limit * np.float32(1 + 2**-22)).sum() / x.size,
        "scale": float(used),
        "scale_ratio_log2": math.log2(float(used) / float(own)),
    }


def assert_cast(found: dict[str, Any], weight: torch.Tensor, scale: float | None = None, fmt: str = "e4m3") -> None:
    want = oracle(weight, scale, fmt)
    for name in sorted(set(want) & set(found)):
        assert found[name] == pytest.approx(want[name], rel=1e-11, abs=1e-14), name


def assert_audited(found: CheckpointAudit, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Every weight is there once, with the oracle's metrics in FP8 under current scaling and in BF16."""
    rows = {row["layer"]: row for row in found.rows}
    assert sorted(row["layer"] for row in found.rows) == sorted(weights)
    for name, weight in weights.items():
        assert rows[name]["shape"] == list(weight.shape)
        assert rows[name]["n"] == weight.numel()
        assert_cast(rows[name]["fp8_current"], weight)
        assert_cast(rows[name]["bf16"], weight, fmt="bf16")
    return rows

"""A run of many tensors, and two in which some leave its band: one far, one by what chance does, and such as are not sampled
at every step or not quantized."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from samples import sample
from tab import start

STEPS, ONSET, MANY = range(0, 160, 4), 80, 300
FAR, CHANCE, SELDOM, NOT_QUANTIZED, MOVED = "far", "chance", "seldom", "plain", "moved"


def write_runs(folder: Path) -> None:
    """`good`, `barely` (one tensor leaves its band, by what chance does) and `bad` (others do as well)."""
    for name, tensors in {"good": (), "barely": (CHANCE,), "bad": (FAR, CHANCE, SELDOM, NOT_QUANTIZED, MOVED)}.items():
        random = np.random.default_rng(len(tensors))
        record = start(folder / name)
        for step in STEPS:
            record.record(sample(step, _rows(step, random, tensors if step >= ONSET else ())))
        record.record_steps({step: _scalars(step, random, bool(tensors) and step >= ONSET) for step in range(161)})
        record.close()


def _rows(step: int, random: np.random.Generator, risen: Sequence[str]) -> list[dict[str, Any]]:
    def underflow(layer: str, by: float, **more: Any) -> dict[str, Any]:
        row = {"layer": layer, "underflow_pct": by, "mse": 1e-3} if layer in risen else {"layer": layer}
        return row | more

    rows = [
        underflow(FAR, 9.0),
        underflow(CHANCE, 1.3),
        underflow(NOT_QUANTIZED, 9.0, scale_source="current"),
        {"layer": "noise", "relative_error": float(0.026 * random.lognormal(0, 0.1))},
        {"layer": MOVED, "scale_ratio_log2": -15.0 if MOVED in risen else 0.0},
    ]
    if step % 12:
        rows.append(underflow(SELDOM, 4.0))
    return rows + [{"layer": f"other.{i}"} for i in range(MANY)]


def _scalars(step: int, random: np.random.Generator, risen: bool) -> dict[str, float]:
    """Losses at every other step, and learning rates at those between."""
    if step % 2:
        return {"lr": 1e-3}
    loss = float(2 + random.normal(0, 0.01) + risen * 0.02 * (step - ONSET))
    return {"loss": float("nan") if risen and step == 100 else loss}

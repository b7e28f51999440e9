"""Good and bad runs to be compared, written as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from samples import FINGERPRINT, sample

from nemo_fp8_debug.record.writer import RunRecordWriter

STEPS = range(0, 200, 20)
CULPRIT = ("decoder.layers.1.mlp.linear_fc2", "input")
VANISHING = ("decoder.layers.0.mlp.linear_fc1", "grad_output")
STEADY = ("decoder.layers.0.self_attention.linear_qkv", "weight")

#: a tensor that FP8 holds without error, as one of powers of two, and one of zeros
EXACT, NO_ERROR = ("exact", "weight"), {"mse": 0.0, "relative_error": 0.0, "underflow_pct": 0.0, "sqnr_db": None}
ZERO, OF_ZEROS = ("zero", "grad_output"), NO_ERROR | {"relative_error": None, "cosine": None, "amin": None, "amax": 0.0}

Rows = Callable[[int], list[dict[str, Any]]]
Losses = Mapping[int, float]


def row(tensor: tuple[str, str], **metrics: Any) -> dict[str, Any]:
    layer, role = tensor
    return {"layer": layer, "gemm": layer.rpartition(".")[2], "role": role, **metrics}


def healthy(step: int) -> list[dict[str, Any]]:
    return [row(VANISHING, mse=1e-10), row(STEADY), row(CULPRIT, mse=1e-5)]


def broken(step: int) -> list[dict[str, Any]]:
    """One tensor underflows more and more; behind it, a gradient vanishes, with what its quantization costs."""
    grown = step / max(STEPS)
    return [
        row(VANISHING, mse=1e-10 * 10 ** (-4 * grown), underflow_pct=0.1 + 90 * grown, relative_error=0.026 + 0.9 * grown),
        row(STEADY),
        row(CULPRIT, mse=1e-5 * 10 ** (3 * grown), underflow_pct=0.1 + 30 * grown, relative_error=0.026 + 0.3 * grown),
    ]


def falling(n: int = 200) -> dict[int, float]:
    """A loss that falls from 5 towards 2, with 1% of noise."""
    noise = np.random.default_rng(0).normal(0, 0.01, n)
    return {i: float((2 + 3 * np.exp(-i / 30)) * (1 + noise[i])) for i in range(n)}


def rising(since: int = 120) -> dict[int, float]:
    """The same, until it rises without return."""
    return {i: loss + max(0, i - since) * 0.05 for i, loss in falling().items()}


def write(folder: Path, rows: Rows | None, losses: Losses, steps: Sequence[int] = STEPS) -> Path:
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    for step in steps if rows else ():
        record.record(sample(step, rows(step)))
    record.record_steps({step: {"loss": loss} for step, loss in losses.items()})
    record.close()
    return folder

"""Runs to be diagnosed, written as records: healthy, with a corrupted scale, with metrics that trend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from samples import FINGERPRINT, sample

from nemo_fp8_debug.record.writer import RunRecordWriter

N, EVERY, ONSET = 200, 8, 104
STEPS = range(0, N, EVERY)
LAYERS = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in (0, 1) for j in (1, 2)]
CULPRIT = LAYERS[2]
FIRST = LAYERS[0]

Change = Callable[[int], Mapping[str, Any]]


def nothing(step: int) -> Mapping[str, Any]:
    return {}


def corrupted(step: int) -> Mapping[str, Any]:
    """The scale of one operand is 64 times too large at once, and it clips."""
    wrong = {"scale": 6400.0, "scale_ratio_log2": 5.86, "overflow_pct": 10.0, "mse": 1e-2, "relative_error": 0.3}
    return wrong if step >= ONSET else {}


def trending(step: int) -> Mapping[str, Any]:
    """Metrics that creep, as they do in runs that go well."""
    part = step / N
    return {"underflow_pct": 8 * part, "outlier_log2": 3 + 3 * part, "mse": 1e-4 * 2 ** (4 * part), "amax": 4 * 2**part}


def falling(seed: int = 0, left: int | None = None) -> dict[int, float]:
    noise = 1 + np.random.default_rng(seed).normal(0, 0.005, N)
    rise = [0.0 if left is None or i < left else 0.1 * min(i - left + 1, 20) for i in range(N)]
    return {i: float((2 + 3 * np.exp(-i / 20)) * noise[i] + rise[i]) for i in range(N)}


def write(
    folder: Path,
    change: Change = nothing,
    losses: Mapping[int, float] | None = None,
    source: str = "engine",
    layers: list[str] = LAYERS,
    culprit: str | Sequence[str] = CULPRIT,
    changed: str = "input",
    validation: Mapping[str, Mapping[int, float]] | None = None,
    until: int = N,
    **scalars: Mapping[int, float],
) -> Path:
    """Write a record with X, or another role, of one layer or several changed, which ends before a step; losses of
    evaluations and scalars are given by name and step."""
    culprits = [culprit] if isinstance(culprit, str) else culprit
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    losses = falling() if losses is None else losses
    for step in range(0, until, EVERY):
        rows = [
            {
                "layer": layer,
                "role": role,
                "scale_source": source,
                **(change(step) if layer in culprits and role == changed else {}),
            }
            for layer in layers
            for role in ("input", "weight", "grad_output")
        ]
        record.record(sample(step, rows))
    steps = sorted(s for s in {*losses, *(s for by_step in scalars.values() for s in by_step)} if s < until)
    record.record_steps({s: {"loss": losses.get(s)} | {name: of.get(s) for name, of in scalars.items()} for s in steps})
    for name, by_step in (validation or {}).items():
        for step, loss in by_step.items():
            record.record_validation(step, {name: loss})
    record.close()
    return folder

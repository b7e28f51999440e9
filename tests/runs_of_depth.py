"""Runs of models of several depths, whose last layer has other gradients than those before it: as of a ViT, where the class
token alone has one there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samples import FINGERPRINT, sample

from nemo_fp8_debug.record.writer import RunRecordWriter

#: bits that the largest value stands above the median, in the last layer, where one token has a gradient, and in others
LAST, OTHERS = 3.0, 12.0
#: step from which some layers are worse
ONSET = 104
STEPS = range(0, 200, 8)


def of_depth(i: int) -> str:
    return f"encoder.layers.{i}.query"


def write_of_depth(folder: Path, depth: int, role: str = "grad_output", extra: Mapping[int, float] | None = None) -> Path:
    """A run whose last layer has few outliers in one operand.

    Args:
        extra: bits that are added from ONSET on, and points of a percent that underflow, by layer.
    """
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    for step in STEPS:
        rows = []
        for i in range(depth):
            more = (extra or {}).get(i, 0.0) if step >= ONSET else 0.0
            bits = (LAST if i == depth - 1 else OTHERS) + more
            rows.append(
                {"layer": of_depth(i), "role": role, "scale_source": "engine", "outlier_log2": bits, "underflow_pct": more}
            )
        record.record(sample(step, rows))
    record.record_steps({step: {"loss": 2.0 + 0.01 * (step % 3)} for step in range(STEPS[-1] + 1)})
    record.close()
    return folder

"""A small run record, and samples for it."""

from __future__ import annotations

from pathlib import Path

import torch
from samples import FINGERPRINT, measured_sample

from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.record.writer import RunRecordWriter


def measured(step: int) -> Sample:
    x = torch.randn(64, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(step))
    return measured_sample(
        step,
        {
            ("decoder.layers.0.mlp.linear_fc1", "input"): x,
            ("decoder.layers.0.mlp.linear_fc1", "weight"): x[:8].float(),
            ("decoder.layers.0.mlp.linear_fc2", "grad_output"): torch.zeros(4, dtype=torch.bfloat16),
        },
    )


def start(folder: Path) -> RunRecordWriter:
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    return record

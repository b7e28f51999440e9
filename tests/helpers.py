"""A recorder that keeps samples in memory, and a plain count of what current scaling loses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemo_fp8_debug.core.sample import Sample


class Samples:
    """Keeps what a monitor records."""

    in_callers_thread = True

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self.steps: dict[int, Mapping[str, float]] = {}
        self.fingerprint: Mapping[str, Any] = {}

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = fingerprint

    def record(self, sample: Sample) -> None:
        self.samples[sample.step] = sample

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        self.steps |= steps

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Not kept."""

    def close(self) -> None:
        pass

    def rows(self, step: int) -> dict[tuple[str, str], dict[str, Any]]:
        """The rows of a step by (layer, role)."""
        columns = self.samples[step].operand_columns
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(self.samples[step]))]
        return {(row["layer"], row["role"]): row for row in rows}


def squared_error_under_own_scale(x: torch.Tensor) -> float:
    """Sum of squared errors of `x` in E4M3 under the scale of its own amax, float64."""
    scale = torch.tensor(448.0) / x.abs().max().float()
    q = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale.double()
    return float((x.double() - q).square().sum())

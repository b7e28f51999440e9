"""Samples as a monitor hands them to its recorders: measured from tensors, or with metrics chosen by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug.capture.backends import torch_linear
from nemo_fp8_debug.capture.backends.base import CastInUse
from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.capture.operand_stats import collect_operand_stats
from nemo_fp8_debug.capture.operands import OperandAccumulator
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.metric_columns import unscale_gradient_columns
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling
from nemo_fp8_debug.observations.operands.measure import measure_tensors
from nemo_fp8_debug.record.schema import SCHEMAS

FINGERPRINT = {"versions": {"torch": "2.8.0"}, "recipe": {"measured_against": "delayed-hybrid"}}
#: what FP8 makes of an ordinary tensor
ORDINARY = {
    "layer": "decoder.layers.0.mlp.linear_fc1",
    "gemm": "linear_fc1",
    "role": "input",
    "recipe": "delayed-hybrid",
    "format": "e4m3",
    "dtype": "bfloat16",
    "scale_source": "engine",
    "calls": 1,
    "ranks": 1,
    "ranks_missing": 0,
    "experts": None,
    "n": 4096,
    "nan": 0,
    "inf": 0,
    "nonfinite_order": None,
    "scale": 100.0,
    "scale_current": 110.0,
    "underflow_pct": 0.1,
    "overflow_pct": 0.0,
    "mse": 1e-4,
    "relative_error": 0.026,
    "sqnr_db": 31.7,
    "cosine": 0.9996,
    "scale_ratio_log2": -0.14,
    "amax": 4.07,
    "amin": 1e-5,
    "dynamic_range_log2": 18.6,
    "outlier_log2": 2.6,
    "kurtosis": 3.0,
    "unscaled_amax": None,
    "unscaled_amin": None,
    "unscaled_mse": None,
}
COLUMNS = [name for name in SCHEMAS["metrics"] if name not in ("attempt", "step", "consumed_samples")]


def sample(step: int, rows: Iterable[Mapping[str, Any]], **scalars: float) -> Sample:
    """A sample of rows that are ordinary but for what they say."""
    full = [ORDINARY | row for row in rows]
    return Sample(step, {"metrics": {name: [row[name] for row in full] for name in COLUMNS}}, scalars)


def measured_sample(step: int, tensors: Mapping[tuple[str, str], torch.Tensor]) -> Sample:
    """A sample of tensors by (layer, role), each under the scale of its own amax."""
    operands = []
    for (layer, role), x in tensors.items():
        gemm = Gemm(layer, nn.Linear(1, 1), torch_linear.BACKEND)
        operand = OperandAccumulator(
            gemm, role, CastInUse(CurrentScaling(), E4M3, parse_recipe("current-hybrid"), "current")
        )
        operand.add_tensor(x, 0)
        operands.append(operand)
    measured = measure_tensors(collect_operand_stats(operands))
    metrics = measured.metrics | unscale_gradient_columns(measured.metrics, None)
    return Sample(step, {"metrics": metrics, "histograms": measured.histograms}, {"loss": 2.5})

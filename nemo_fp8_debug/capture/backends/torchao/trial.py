"""Check that the installed torchao casts as release 0.18 does, once per sampled step.

The trial calls the function that `Float8Linear` itself calls, once with a few values and once with several thousand. It
cannot detect differences that occur only in larger tensors, or only after the trial.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ....numerics.block_scaling import RowwiseScaling
from ....numerics.formats import FloatFormat, saturating_cast
from ....numerics.metrics import compute_amax
from ....numerics.tensor_scaling import CurrentScaling

#: rows of large, small and ordinary values, of a value that rounds to a power of two, and of zeros
_ROWS = ((3.0e4, -7.0, 1e-3), (1e-13, -3e-14, 0.0), (1.75, 0.3, -0.11), (-1.7500001, 448.0, 0.07), (0.0, -0.0, 0.0))


#: number of values in another trial, because kernels may be chosen by size
_MANY = 1 << 12


def reset_cast_trials() -> str:
    """Forget earlier trials, because the arithmetic may differ in this step. Return "", because torchao is supported."""
    find_cast_difference.cache_clear()
    return ""


@functools.cache
def find_cast_difference(rule: CurrentScaling | RowwiseScaling, fmt: FloatFormat) -> str:
    """Return how torchao's cast differs from ours, or "" if both agree. Compare once per rule and sampled step."""
    with torch.no_grad():
        x = torch.tensor(_ROWS, device="cpu")
        many = torch.linspace(-1.7, 300.0, _MANY, device="cpu").view(-1, 64)
        by_tensor = [*(x if isinstance(rule, CurrentScaling) else [x]), many]
        for x in (*by_tensor, *(x.bfloat16() for x in by_tensor)):
            try:
                theirs = _cast_by_torchao(x, rule, fmt)
            except Exception as error:
                return f"{type(error).__name__}: {error}".splitlines()[0]
            scale, codes = _cast_here(x, rule, fmt)
            if not torch.equal(theirs._scale, scale):
                return f"scales of {rule} differ"
            if not torch.equal(theirs._data.view(torch.uint8), codes.view(torch.uint8)):
                return f"codes of {fmt.name} differ"
    return ""


def _cast_by_torchao(x: torch.Tensor, rule: CurrentScaling | RowwiseScaling, fmt: FloatFormat) -> Any:
    config, layer, scaling, tensor = (
        sys.modules[f"torchao.float8.{name}"]
        for name in ("config", "float8_linear", "float8_scaling_utils", "float8_training_tensor")
    )
    rowwise = isinstance(rule, RowwiseScaling)
    granularity = config.ScalingGranularity.AXISWISE if rowwise else config.ScalingGranularity.TENSORWISE
    return layer.hp_tensor_to_float8_dynamic(
        x,
        fmt.dtype,
        tensor.LinearMMConfig(),
        gemm_input_role=tensor.GemmInputRole.INPUT,
        scaling_granularity=granularity,
        axiswise_dim=scaling.get_maybe_axiswise_dim(-1, granularity),
        round_scales_to_power_of_2=rule.power_of_two,
    )


def _cast_here(
    x: torch.Tensor, rule: CurrentScaling | RowwiseScaling, fmt: FloatFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(rule, RowwiseScaling):
        found = rule.quantize(x, "input", fmt)
        return found.scales.stored, found.codes
    scale = rule.compute_scale(compute_amax(x), fmt.max)
    return scale, saturating_cast(x.float() * scale, fmt)

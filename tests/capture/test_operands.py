"""What is collected of an operand over the micro-batches of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_fp8_debug.capture.backends import torch_linear
from nemo_fp8_debug.capture.backends.base import ScaleInUse, not_quantized
from nemo_fp8_debug.capture.collect import collect
from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.capture.operands import KEPT_APART, Operand
from nemo_fp8_debug.kernels import histogram_of
from nemo_fp8_debug.measurement.measure import measure
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.metrics import QuantizationSums
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling

#: casts of a step's calls: one histogram of them all, one histogram a call up to `KEPT_APART`, and what comes after
IN_USE = {
    "one scale, of the whole": ScaleInUse(CurrentScaling(), E4M3, "current", "current"),
    "one scale, held": ScaleInUse(torch.tensor(3.0), E4M3, "delayed", "engine"),
    "a scale a call": ScaleInUse(CurrentScaling(), E4M3, "current", "engine"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use", IN_USE.values(), ids=IN_USE)
def test_block_recipes_are_what_if_on_each_micro_batch_by_itself(use: ScaleInUse, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    batches = [(10.0**i * torch.randn(24, 160, generator=g)).to(dtype) for i in range(KEPT_APART + 2)]
    what_if = [parse_recipe(name) for name in ("mxfp8", "blockwise", "nvfp4")]
    operand = Operand(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", use, what_if=what_if)
    for order, x in enumerate(batches):
        operand.add(x, order)
    assert torch.equal(operand.total.counts, histogram_of(torch.stack(batches)).counts)
    for recipe in what_if:
        got = QuantizationSums.concat(operand.what_if_sums[recipe.name])
        by = recipe.scaling, "input", recipe.format_of("input")
        want = QuantizationSums.concat([quantization_sums_in_blocks(x, *by) for x in batches])
        for name, column in vars(want).items():
            assert getattr(got, name).tolist() == pytest.approx(column.tolist(), rel=1e-12, abs=0.0), (recipe.name, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_metrics_of_what_is_not_quantized_are_over_finite_values(dtype: torch.dtype) -> None:
    """Their scale too, and what is measured under it."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = []
    for value in (0.0, torch.inf):
        x[0, 0] = value
        seen = Operand(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", not_quantized("input"))
        seen.add(x, 0)
        rows.append({name: column[0] for name, column in measure(collect([seen])).metrics.items()})
    finite, infinite = rows
    assert infinite["inf"] == 1 and infinite["scale"] == finite["scale"]
    assert infinite["underflow_pct"] == finite["underflow_pct"] and infinite["overflow_pct"] == 0
    assert infinite["relative_error"] == pytest.approx(finite["relative_error"], rel=1e-12)

"""What is collected of an operand over the micro-batches of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from nemo_fp8_debug.capture.backends import torch_linear
from nemo_fp8_debug.capture.backends.base import CastInUse, make_unquantized_cast
from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.capture.operand_stats import collect_operand_stats
from nemo_fp8_debug.capture.operands import KEPT_APART, OperandAccumulator
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics.block_scaling import quantization_sums_in_blocks
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.metrics import QuantizationSums
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling
from nemo_fp8_debug.observations.operands.measure import measure_tensors

#: casts of a step's calls: one histogram of them all, one histogram a call up to `KEPT_APART`, and what comes after
IN_USE = {
    "one scale, of the whole": CastInUse(CurrentScaling(), E4M3, parse_recipe("current"), "current"),
    "one scale, held": CastInUse(torch.tensor(3.0), E4M3, parse_recipe("delayed"), "engine"),
    "a scale a call": CastInUse(CurrentScaling(), E4M3, parse_recipe("current"), "engine"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use", IN_USE.values(), ids=IN_USE)
def test_block_recipes_are_what_if_on_each_micro_batch_by_itself(use: CastInUse, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    batches = [(10.0**i * torch.randn(24, 160, generator=g)).to(dtype) for i in range(KEPT_APART + 2)]
    what_if = [parse_recipe(name) for name in ("mxfp8", "blockwise", "nvfp4")]
    operand = OperandAccumulator(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", use, what_if=what_if)
    for order, x in enumerate(batches):
        operand.add_tensor(x, order)
    assert torch.equal(operand.total_histogram.counts, count_histogram(torch.stack(batches)).counts)
    for recipe in what_if:
        got = QuantizationSums.concat(operand.what_if_sums[recipe.name])
        by = recipe.scaling, "input", recipe.get_format("input")
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
        seen = OperandAccumulator(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", make_unquantized_cast("input"))
        seen.add_tensor(x, 0)
        rows.append({name: column[0] for name, column in measure_tensors(collect_operand_stats([seen])).metrics.items()})
    finite, infinite = rows
    assert infinite["inf"] == 1 and infinite["scale"] == finite["scale"]
    assert infinite["underflow_pct"] == finite["underflow_pct"] and infinite["overflow_pct"] == 0
    assert infinite["relative_error"] == pytest.approx(finite["relative_error"], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_an_infinity_leaves_errors_those_of_the_finite_values(dtype: torch.dtype, role: str) -> None:
    """Against float64: the scale is that of the largest finite magnitude, which the row reports, on either path."""
    x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, -torch.inf, torch.nan
    seen = OperandAccumulator(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), role, make_unquantized_cast(role))
    seen.add_tensor(x, 0)
    row = {name: column[0] for name, column in measure_tensors(collect_operand_stats([seen])).metrics.items()}
    finite = x[x.isfinite()].double().numpy()
    largest, mantissa, lowest = (448.0, 3, -6) if role == "input" else (57344.0, 2, -14)
    assert row["scale"] == np.float32(largest) / np.float32(np.abs(finite).max())
    y = (finite.astype(np.float32) * np.float32(row["scale"])).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(np.where(y == 0, 1, y)))), lowest) - mantissa)
    codes = np.clip(np.round(y / step) * step, -largest, largest)
    error = codes / np.float64(row["scale"]) - finite
    assert row["relative_error"] == pytest.approx(np.sqrt((error**2).sum() / (finite**2).sum()), rel=1e-5)
    assert row["underflow_pct"] == pytest.approx(100 * np.mean((codes == 0) & (finite != 0)), rel=1e-9)
    assert (row["inf"], row["nan"], row["n"]) == (2, 1, x.numel() - 3)

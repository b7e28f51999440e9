"""The emulated kernels of block recipes: products are those of what the codes of each copy stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_te import CASTS, casts_of, te
from te_table.compare import stood_for
from te_table.layers import tensor
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

RECIPES = {
    "blockwise": Float8BlockScaling(),
    "blockwise in other blocks": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 in squares": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 in rows": NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, disable_stochastic_rounding=True),
    "nvfp4 4-over-6": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_products_are_of_the_copies_that_each_gemm_takes(recipe: Any) -> None:
    linear = te.Linear(160, 192, params_dtype=torch.bfloat16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(tensor(192, 160, seed=0, size=0.02))
    x, dy = tensor(96, 160, seed=1, size=1.0).requires_grad_(), tensor(96, 192, seed=2, size=1e-3)
    with te.autocast(enabled=True, recipe=recipe):
        y = linear(x)
    y.backward(dy)
    row, column = {}, {}
    for role in ("X", "W", "dY"):
        of_rows, of_columns = casts_of(linear, role)
        assert (of_rows.usage, of_columns.usage) == ("rowwise", "columnwise")
        row[role] = stood_for(of_rows)
        # MXFP8 keeps both copies alike, the others the column-wise one transposed.
        lies_alike = of_columns.codes.shape == of_rows.codes.shape
        column[role] = stood_for(of_columns) if lies_alike else stood_for(of_columns).t()
    assert len(CASTS) == 6
    for found, expected in (
        (y, row["X"] @ row["W"].t()),
        (x.grad, row["dY"] @ column["W"]),
        (linear.weight.grad, column["dY"].t() @ column["X"]),
    ):
        assert found is not None
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-4 * float(expected.abs().max()))
    exact = x.detach().double() @ linear.weight.detach().double().t()
    assert (
        0.01
        < (row["X"] @ row["W"].t() - exact).norm() / exact.norm()
        < (0.2 if "nvfp4" in str(type(recipe)).lower() else 0.06)
    )
